/*
 * canary.h: faults that a run plants on purpose, each with the checker that has to catch it: a
 * checker that lets its canary live proves nothing. They are planted in the simulated surroundings
 * of the product's objects, or between two of them; never in what a checker is told.
 */
#ifndef LK_TESTS_SIM_CANARY_H
#define LK_TESTS_SIM_CANARY_H

#include <stdbool.h>
#include <stddef.h>

/* name, text, who catches it, what it does */
#define SIM_CANARY_TABLE(X)                                                                        \
    X(DOUBLE_FINISH, "double-finish", "requests", "a request is told twice that it has ended")     \
    X(WRONG_TOKEN, "wrong-token", "requests", "a token changes on its way")                        \
    X(KV_ALIAS, "kv-alias", "kv", "a sequence reads a block of another one")                       \
    X(STALE_KV, "stale-kv", "kv", "nobody obeys clear_cache")                                      \
    X(BLOCK_LEAK, "block-leak", "kv", "a block is taken and in no table")                          \
    X(WEIGHT_FLIP, "weight-flip", "weights", "a number in one rank's weights changes")             \
    X(WRONG_VALUES, "wrong-values", "weights", "a trainer sends other numbers than it means to")   \
    X(TORN_BROADCAST, "torn-broadcast", "weights", "the ranks get half of an NCCL broadcast")      \
    X(HALF_UPDATE, "half-update", "weights", "a failed call leaves other weights behind")          \
    X(MIXED_STEP, "mixed-step", "weights", "one rank takes a step in another epoch")               \
    X(GATED_STEP, "gated-step", "weights", "a rank steps while an update is half done")            \
    X(EARLY_PAUSE, "early-pause", "pause", "a rank answers a pause when it hears of it")           \
    X(KEEP_ABORTS, "keep-aborts", "pause", "a pause in mode keep ends the requests")               \
    X(ABORT_KEEPS, "abort-keeps", "pause", "a pause in mode abort ends nothing")                   \
    X(WAIT_KEEPS, "wait-keeps", "pause", "a pause in mode wait does not wait")                     \
    X(LONE_STEP, "lone-step", "rounds", "a rank of an idle group steps by itself")                 \
    X(OTHER_STATE, "other-state", "rounds", "a rank counts a wave that nobody else had")           \
    X(OWN_VOTE, "own-vote", "rounds", "a rank takes its own vote for the result")                  \
    X(LOST_END, "lost-end", "liveness", "the end of a request never arrives")                      \
    X(UNNUMBERED, "unnumbered", "liveness", "engines do not see that messages were lost")          \
    X(UNTOLD, "untold-removal", "liveness", "the coordinator is not told that a rank is removed")  \
    X(FORGOTTEN, "forgotten-request", "resources", "a rank has a request that nobody waits for")   \
    X(REAL_TIME, "real-time", "determinism", "the run looks at the real clock")

typedef enum {
    SIM_CANARY_NONE,
#define X(name, text, checker, what) SIM_CANARY_##name,
    SIM_CANARY_TABLE(X)
#undef X
        SIM_CANARY_COUNT
} sim_canary_t;

const char *sim_canary_name(sim_canary_t canary);
/* Name of the checker that has to catch it. */
const char *sim_canary_checker(sim_canary_t canary);
/* SIM_CANARY_NONE: unknown. */
sim_canary_t sim_canary_find(const char *name);
/* "double-finish: a request is ..." one per line. */
void sim_canary_list(char *out, size_t room);

#endif
