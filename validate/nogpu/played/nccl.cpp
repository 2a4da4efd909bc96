// NCCL, played: communicators without peers. A small operand is answered as if every rank had sent the same,
// so that what PyTorch compares or reads back of a collective is sound; a large one stays unknown.
// Source: docs.nvidia.com/deeplearning/nccl; nccl.h.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device.h"
#include "streams.h"

using namespace played;

namespace {

constexpr size_t ID_BYTES = 128;  // ncclUniqueId

struct Communicator {
    int rank, ranks;
    void* last = new_event();  // its latest work
};

// A communicator does one work after the other, whatever streams they are asked of.
// Source: NCCL, src/enqueue.cc (`ncclLaunchPrepare`, `ncclLaunchFinish`: `deviceStream`).
void in_order(const Communicator* group, const void* stream) {
    stream_waits(stream, group->last);
    record(group->last, stream);
}

// How many ranks are in the part of a communicator that is split off next: NCCL asks them, we are told.
thread_local int told = 0;

// Bytes of an element, by ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64,
// bfloat16, float8e4m3, float8e5m2.
size_t element_bytes(int type) {
    constexpr size_t known[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return known[type];
}

int joined(Communicator** communicator, int ranks, int rank) {
    *communicator = new Communicator{rank, ranks};
    return 0;
}

// A group of calls, which NCCL runs as one: the own part of an all-gather, and the others' places in it, where
// it is made of broadcasts (torch 2.15, torch/csrc/distributed/c10d/nccl2).
thread_local int open_groups = 0;
thread_local const void* own_part = nullptr;
thread_local size_t part_bytes = 0;
thread_local std::vector<void*> others;

struct UniqueId {
    char bytes[ID_BYTES];
};

}  // namespace

extern "C" {

const char* ncclGetErrorString(int) { return "an error of the played NCCL"; }
const char* ncclGetLastError(Communicator*) { return ""; }

int ncclGetUniqueId(UniqueId* id) {
    std::memset(id, 0, sizeof *id);
    return 0;
}

int ncclCommInitRank(Communicator** made, int ranks, UniqueId, int rank) { return joined(made, ranks, rank); }

int ncclCommInitRankConfig(Communicator** made, int ranks, UniqueId, int rank, void*) {
    return joined(made, ranks, rank);
}

int ncclCommInitRankScalable(Communicator** made, int ranks, int rank, int, UniqueId*, void*) {
    return joined(made, ranks, rank);
}

void memplan_nogpu_part_has(int ranks) { told = ranks; }

// PyTorch's key is the rank in the part: torch/csrc/distributed/c10d/NCCLUtils.cpp (`NCCLComm::split`).
int ncclCommSplit(Communicator*, int, int key, Communicator** made, void*) {
    if (told == 0) {
        std::fprintf(stderr, "a communicator is split, and nobody has said into how many ranks\n");
        return 4;  // ncclInvalidArgument
    }
    return joined(made, told, key);
}

int ncclCommDestroy(Communicator* communicator) {
    destroy_event(communicator->last);
    delete communicator;
    return 0;
}

int ncclCommAbort(Communicator* communicator) { return ncclCommDestroy(communicator); }

int ncclCommCount(Communicator* communicator, int* ranks) {
    *ranks = communicator->ranks;
    return 0;
}

int ncclCommUserRank(Communicator* communicator, int* rank) {
    *rank = communicator->rank;
    return 0;
}

int ncclCommGetAsyncError(Communicator*, int* error) {
    *error = 0;
    return 0;
}

int ncclSend(const void*, size_t, int, int, Communicator* group, void* stream) {
    in_order(group, stream);
    return 0;
}

int ncclAlltoAll(const void*, void*, size_t, int, Communicator* group, void* stream) {
    in_order(group, stream);
    return 0;
}

int ncclRecv(void*, size_t, int, int, Communicator* group, void* stream) {
    in_order(group, stream);
    return 0;
}

int ncclAllReduce(const void* from, void* to, size_t n, int type, int, Communicator* group, void* stream) {
    in_order(group, stream);
    if (from != to) copy(to, from, n * element_bytes(type));
    return 0;
}

int ncclReduce(const void* from, void* to, size_t n, int type, int, int root, Communicator* group, void* stream) {
    in_order(group, stream);
    if (group->rank == root && from != to) copy(to, from, n * element_bytes(type));
    return 0;
}

int ncclGroupStart() {
    ++open_groups;
    return 0;
}

int ncclGroupEnd() {
    if (--open_groups > 0) return 0;
    for (void* to : others)
        if (own_part != nullptr && part_bytes * (others.size() + 1) <= SMALL) copy(to, own_part, part_bytes);
    own_part = nullptr;
    others.clear();
    return 0;
}

int ncclBroadcast(const void* from, void* to, size_t n, int type, int root, Communicator* group, void* stream) {
    in_order(group, stream);
    if (from != to) copy(to, from, n * element_bytes(type));
    if (open_groups > 0 && root == group->rank) {
        own_part = from;
        part_bytes = n * element_bytes(type);
    } else if (open_groups > 0) {
        others.push_back(to);
    }
    return 0;
}

int ncclAllGather(const void* from, void* to, size_t n, int type, Communicator* group, void* stream) {
    in_order(group, stream);
    size_t bytes = n * element_bytes(type);
    for (int rank = 0; rank < group->ranks && bytes * group->ranks <= SMALL; ++rank) {
        char* slot = static_cast<char*>(to) + rank * bytes;
        if (slot != from) copy(slot, from, bytes);
    }
    return 0;
}

int ncclReduceScatter(const void* from, void* to, size_t n, int type, int, Communicator* group, void* stream) {
    in_order(group, stream);
    size_t bytes = n * element_bytes(type);
    const char* own = static_cast<const char*>(from) + group->rank * bytes;
    if (own != to) copy(to, own, bytes);
    return 0;
}

}  // extern "C"
