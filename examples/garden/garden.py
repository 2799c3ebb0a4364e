"""How trees grow."""


def height_m(age_years: int) -> float:
    """A plum tree gains half a metre a year, for eight years."""
    return min(age_years, 8) * 5
