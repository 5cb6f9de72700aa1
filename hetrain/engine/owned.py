"""What a rank owns of one embedding dim."""

from dataclasses import dataclass
from typing import Protocol

from hetrain.engine.recipe import Recipe
from hetrain.engine.store_settings import StoreSettings
from hetrain.store.owner import Owner
from hetrain.store.row_codec import RowCodec
from hetrain.store.space import Placement


class OwnedPart(Protocol):
    """One embedding dim as far as its owner goes: a WidthGroup, or an `Owned`."""

    @property
    def placement(self) -> Placement: ...  # noqa: D102
    @property
    def owner(self) -> Owner: ...  # noqa: D102


@dataclass(frozen=True)
class Owned:
    """One embedding dim on a rank that owns rows and has nothing else of them."""

    placement: Placement
    owner: Owner


def make_owned(recipe: Recipe, settings: StoreSettings, placement: Placement, rank: int, *, held_back: bool) -> Owned:
    """What `rank` owns of `placement`, and no cache beside it."""
    codec = RowCodec(settings.rows, placement.space.dim, recipe.traffic)
    return Owned(placement, make_owner(recipe, settings, placement, rank, held_back=held_back, codec=codec))


def make_owner(
    recipe: Recipe, settings: StoreSettings, placement: Placement, rank: int, *, held_back: bool, codec: RowCodec
) -> Owner:
    """The owner of `rank`'s rows of `placement`. `held_back`, `codec`: see Owner."""
    return Owner(
        placement.space,
        placement,
        rank,
        recipe.row_optimizer,
        seed=recipe.seed,
        device=settings.device,
        held_back=held_back,
        clock=settings.clock,
        staleness=settings.staleness,
        audit=settings.audit_every > 0,
        directory=settings.directory,
        workers=placement.world_size - settings.servers,
        index=settings.index,
        codec=codec,
    )
