"""The layout of gradients in buckets, as a pure function."""

from __future__ import annotations

import random

from bagua_ext.buckets import Piece, lay_out, ready_order


def test_gradients_that_were_never_ready_come_last_and_in_reverse() -> None:
    assert ready_order([2, 0, 2], 5) == [2, 0, 4, 3, 1]
    assert ready_order([], 3) == [2, 1, 0]


def test_one_dtype_without_groups_is_left_to_the_core() -> None:
    pieces = [Piece("float32", 100)] * 3
    assert lay_out(pieces, [2, 1, 0], 150) == ([2, 1, 0], None)


def test_interleaved_dtypes_share_buckets_by_dtype() -> None:
    pieces = [Piece("float32", 4), Piece("bfloat16", 2)] * 3
    order, bucket_of = lay_out(pieces, list(range(6)), 1000)
    assert bucket_of == [0, 0, 0, 1, 1, 1]
    assert order == [0, 2, 4, 1, 3, 5]


def test_a_group_is_one_bucket_however_large_and_starts_when_its_last_is_ready() -> None:
    pieces = [Piece("f", 10, group=0), Piece("f", 10), Piece("f", 10, group=0), Piece("f", 10)]
    order, bucket_of = lay_out(pieces, [0, 1, 2, 3], 10)
    assert order == [1, 0, 2, 3]
    assert bucket_of == [0, 1, 1, 2]


def test_any_layout_is_a_permutation_of_full_buckets_of_one_kind() -> None:
    rng = random.Random(1)
    for _ in range(200):
        count = rng.randint(1, 30)
        pieces = [
            Piece(rng.choice("abc"), rng.randint(0, 50), rng.choice((None, None, 0, 1)))
            for _ in range(count)
        ]
        order = rng.sample(range(count), count)
        flat, bucket_of = lay_out(pieces, order, 60)
        assert sorted(flat) == list(range(count))
        if bucket_of is None:
            continue
        assert bucket_of == sorted(bucket_of) and bucket_of[0] == 0
        for bucket in range(bucket_of[-1] + 1):
            members = [i for i, own in zip(flat, bucket_of, strict=True) if own == bucket]
            assert len({(pieces[i].dtype, pieces[i].group) for i in members}) == 1
            if pieces[members[0]].group is None and len(members) > 1:
                assert sum(pieces[i].bytes for i in members) <= 60
