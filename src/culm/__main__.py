from culm.cli.main import main

main()
