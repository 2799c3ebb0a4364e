import unittest

from garden import height_m


class TestGarden(unittest.TestCase):
    def test_a_plum_tree_grows_to_four_metres(self) -> None:
        assert [height_m(1), height_m(8), height_m(80)] == [0.5, 4.0, 4.0]
