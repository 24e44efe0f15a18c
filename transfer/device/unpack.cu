/* unpack.cu: the kernels (unpack.h, copies.h). */
#include "transfer/device/copies_thread.h"
#include "transfer/device/unpack_thread.h"

#define WARPS  (UNPACK_THREADS / 32u)
#define BLOCKS 3 /* on a multiprocessor at once: what leaves the registers for eight elements */

/* The group that a unit belongs to. */
static __device__ uint32_t group_of(const unpack_launch_t &launch, uint32_t unit)
{
    uint32_t low = 0, high = launch.n_groups;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (launch.groups[middle].first_unit <= unit) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static __device__ __forceinline__ uint64_t warp_sum(uint64_t x)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x += __shfl_down_sync(0xFFFFFFFFu, (unsigned long long)x, step);
    }
    return x;
}

/* What UNPACK_THREADS threads share: all of a block, or one of the teams of a block. */
struct team_t {
    unpack_item_t items[UNPACK_GROUP];
    uint64_t sums[UNPACK_GROUP][2][UNPACK_THREADS]; /* each thread its own */
};

static_assert(sizeof(team_t) == UNPACK_SHARED, "what a launch asks for");

template <bool ALONE> static __device__ __forceinline__ void meet(const uint32_t team)
{
    if (ALONE) {
        __syncthreads();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(UNPACK_THREADS) : "memory");
    }
}

template <bool ALONE>
static __device__ __forceinline__ void do_unit(const unpack_launch_t &launch, const uint32_t unit,
                                               team_t &shared, const uint32_t team,
                                               const uint32_t thread)
{
    const unpack_group_t group = launch.groups[group_of(launch, unit)];
    const uint64_t start = (uint64_t)(unit - group.first_unit) * launch.chunks * UNPACK_CHUNK;
    if (thread < group.count) {
        shared.items[thread] = launch.items[group.first + thread];
    }
    for (uint32_t i = 0; group.digests && i < group.count; i++) {
        shared.sums[i][0][thread] = shared.sums[i][1][thread] = 0;
    }
    meet<ALONE>(team);
    for (uint32_t c = 0; c < launch.chunks; c++) {
        const uint64_t chunk = start + c * UNPACK_CHUNK;
        if (chunk >= shared.items[0].numel) {
            break;
        }
        uint64_t mixed[2][UNPACK_PER_THREAD];
        if (group.digests) {
            unpack_mix_indices(group.index + chunk, thread, mixed);
        }
        for (uint32_t i = 0; i < group.count && chunk < shared.items[i].numel; i++) {
            uint64_t sum[2] = {0, 0};
            unpack_thread(&shared.items[i], group.index, chunk, thread, mixed, sum);
            if (shared.items[i].lanes != 0) {
                shared.sums[i][0][thread] += sum[0];
                shared.sums[i][1][thread] += sum[1];
            }
        }
    }
    meet<ALONE>(team);
    /* a warp adds up a lane of an item */
    for (uint32_t s = thread / 32u; s < 2u * group.count; s += WARPS) {
        if (shared.items[s / 2u].lanes == 0) {
            continue;
        }
        uint64_t total = 0;
        for (uint32_t i = thread % 32u; i < UNPACK_THREADS; i += 32u) {
            total += shared.sums[s / 2u][s % 2u][i];
        }
        total = warp_sum(total);
        if (thread % 32u == 0) {
            atomicAdd((unsigned long long *)shared.items[s / 2u].lanes + s % 2u,
                      (unsigned long long)total);
        }
    }
}

/* One block is one unit. */
extern "C" __global__ void __launch_bounds__(UNPACK_THREADS, BLOCKS)
    lk_unpack(const __grid_constant__ unpack_launch_t launch)
{
    __shared__ team_t shared;
    do_unit<true>(launch, blockIdx.x, shared, 0, threadIdx.x);
}

/* The same beside a collective: a block fills a multiprocessor, so that as many as it has blocks are
 * taken and the others are free: a collective's blocks need a whole one, and blocks of lk_unpack
 * would be on each. A team does one unit after the other. */
extern "C" __global__ void __launch_bounds__(UNPACK_THREADS *UNPACK_TEAMS, 1)
    lk_unpack_beside(const __grid_constant__ unpack_launch_t launch)
{
    extern __shared__ team_t teams[];
    const uint32_t team = threadIdx.x / UNPACK_THREADS, thread = threadIdx.x % UNPACK_THREADS;
    for (uint32_t unit = blockIdx.x * UNPACK_TEAMS + team; unit < launch.n_units;
         unit += gridDim.x * UNPACK_TEAMS) {
        do_unit<false>(launch, unit, teams[team], team, thread);
        meet<false>(team); /* the next one writes where the sums were read */
    }
}

extern "C" __global__ void __launch_bounds__(COPIES_THREADS, 4)
    lk_copies(const __grid_constant__ copies_launch_t launch)
{
    for (uint32_t chunk = blockIdx.x; chunk < launch.n_chunks; chunk += gridDim.x) {
        const copies_item_t item = launch.items[copies_item_of(&launch, chunk)];
        copies_thread(&item, chunk, threadIdx.x);
    }
}
