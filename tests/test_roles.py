"""Who computes and who owns rows."""

from hetrain.ranks import Ranks
from hetrain.roles import Roles


def test_without_servers_every_rank_does_both() -> None:
    roles = Roles(3)
    assert (roles.workers, list(roles.owners)) == (3, [0, 1, 2])
    assert all(roles.computes(rank) and roles.owns(rank) for rank in range(3))
    assert roles.name(1) == "rank 1"


def test_the_last_ranks_are_servers() -> None:
    roles = Roles(5, 2)
    assert (roles.workers, list(roles.owners)) == (3, [3, 4])
    assert [roles.computes(rank) for rank in range(5)] == [True, True, True, False, False]
    assert [roles.owns(rank) for rank in range(5)] == [False, False, False, True, True]
    assert (roles.name(2), roles.name(3)) == ("worker rank 2", "server rank 3")
    assert [Ranks(rank, 5, None, 2).computes for rank in (2, 3)] == [True, False]
