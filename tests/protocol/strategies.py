"""Every message that can be built, for property tests."""

from typing import cast

from hypothesis import strategies as st

from lmlive.protocol import messages as m
from lmlive.protocol import replies as r
from lmlive.protocol.codec import Header
from lmlive.protocol.verbs import Role

U32 = 2**32 - 1
I63 = 2**63 - 1
U64 = 2**64 - 1

u32 = st.integers(0, U32)
i63 = st.integers(0, I63)
u64 = st.integers(0, U64)
text = st.text(max_size=40)
secrets = st.binary(min_size=16, max_size=16)
leases = st.none() | text
seconds = st.floats(0, 1e9, allow_nan=False)


def packed(width: int, most: int = 5) -> st.SearchStrategy[bytes]:
    items = st.lists(st.binary(min_size=width, max_size=width), max_size=most)
    return items.map(b"".join)


keys = packed(32)
blocks = st.lists(packed(4), max_size=3).map(tuple)
tags = st.binary(min_size=16, max_size=16)

handles: st.SearchStrategy[m.Handle] = st.builds(m.FdHandle, index=u32, nbytes=st.integers(1, I63)) | st.builds(
    m.CudaHandle,
    handle=st.binary(min_size=64, max_size=64),
    uuid=st.text(st.characters(codec="ascii"), max_size=96),
    nbytes=st.integers(1, I63),
)


@st.composite
def planes(draw: st.DrawFn, count: int) -> m.Plane:
    shape = draw(st.lists(i63, max_size=4))
    return m.Plane(
        handle=draw(st.integers(0, count - 1)),
        offset=draw(i63),
        stride=draw(i63),
        run=draw(i63),
        in_block_shape=tuple(shape),
        stride_order=tuple(draw(st.permutations(range(len(shape))))),
    )


@st.composite
def registers(draw: st.DrawFn) -> m.Register:
    brought = draw(st.lists(handles, max_size=3))
    group = st.builds(
        m.Group,
        block_tokens=st.integers(1, U32),
        num_blocks=st.integers(1, U32),
        planes=st.lists(planes(len(brought)), max_size=3).map(tuple) if brought else st.just(()),
    )
    world_size = draw(st.integers(1, 4096))
    return m.Register(
        secret=draw(secrets),
        model=draw(text),
        revision=draw(text),
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        kv_dtype=draw(text),
        format=draw(text),
        mode=draw(st.sampled_from(m.MODES)),
        strategy=draw(text),
        groups=tuple(draw(st.lists(group, max_size=3))),
        handles=tuple(brought),
    )


def prepared(slots: int) -> st.SearchStrategy[r.PreparedReply]:
    """Give a reply with so many slots, with offsets or without."""
    return st.builds(
        r.PreparedReply,
        lease=leases,
        chunk_bytes=i63,
        chunks=st.binary(min_size=4 * slots, max_size=4 * slots),
        offsets=st.just(b"") | st.binary(min_size=8 * slots, max_size=8 * slots),
        tokens=i63,
        reason=text,
    )


requests: st.SearchStrategy[m.Request] = st.one_of(
    st.builds(
        m.Hello,
        min_version=st.integers(0, 255),
        max_version=st.integers(0, 255),
        role=st.sampled_from(Role),
        software=text,
        secret=secrets,
    ),
    st.builds(m.Ping, instance_id=st.none() | st.integers(1, U64)),
    registers(),
    st.builds(m.Unregister, secret=secrets),
    st.builds(m.Store, keys=keys, blocks=blocks, skip_tokens=i63, tag=tags),
    st.builds(m.Retrieve, keys=keys, blocks=blocks, skip_tokens=i63, lease=leases),
    st.builds(m.Lookup, model=text, revision=text, world_size=st.integers(1, 4096), keys=keys, lease=leases),
    st.builds(m.Release, lease=text),
    st.builds(m.PrepareStore, keys=keys, skip_tokens=i63, tag=tags),
    st.builds(m.CommitStore, lease=text, checksums=st.none() | st.binary(max_size=40)),
    st.builds(m.PrepareRetrieve, keys=keys, skip_tokens=i63, lease=leases),
    st.builds(m.Read, lease=text, position=i63, nbytes=st.integers(1, 64 << 20)),
    st.builds(m.Write, lease=text, position=i63),
    st.builds(m.Clear, model=st.none() | text),
    st.builds(m.Status),
    st.builds(m.Reap, instance_id=u64, generation=st.none() | u64),
    st.builds(m.Events, after_seq=u64, maximum=u64),
)

structured_replies: st.SearchStrategy[
    r.HelloReply | r.RegisterReply | r.StoreReply | r.RetrieveReply | r.LookupReply | r.PreparedReply
] = st.one_of(
    st.builds(
        r.HelloReply,
        version=st.integers(0, 255),
        chunk_tokens=st.integers(1, I63),
        beat=seconds,
        reap_timeout=seconds,
        limits=st.fixed_dictionaries(dict.fromkeys(r.LIMIT_NAMES, u64)),
        tether_path=leases,
        server_monotonic_ns=i63,
    ),
    st.builds(r.RegisterReply, beat=seconds, layout_key=st.just(b"") | st.binary(min_size=32, max_size=32)),
    st.builds(r.StoreReply, tokens=i63, chunks=i63, reason=text),
    st.builds(r.RetrieveReply, tokens=i63, reason=text),
    st.builds(r.LookupReply, tokens=i63, lease=leases, lease_seconds=seconds, reason=text),
    st.integers(0, 9).flatmap(prepared),
)

headers = st.builds(
    Header,
    version=st.just(1),
    kind=st.just(0),
    code=st.integers(0, 65_535),
    request_id=u64,
    epoch=u64,
    instance_id=u64,
    generation=u64,
    deadline_ns=st.integers(-(2**63), I63),
)

payloads: st.SearchStrategy[list[object]] = st.lists(
    cast(
        "st.SearchStrategy[object]",
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**63), U64)
            | st.floats()
            | st.text(max_size=8)
            | st.binary(max_size=70),
            lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=20,
        ),
    ),
    max_size=12,
)
"""Whatever msgpack can say, as the payload of anything."""
