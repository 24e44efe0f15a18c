/* record.pml: with RECORD, each different decision of the search becomes a row (record.h), which
 * conformance.c repeats with the real group; with RECORD_NEXT, so does what each rank is to do next in each
 * different state (guards.c), also when that is nothing. For LIVES == 1 and without CANCELS. */
c_decl {
\#include "record.h"
}
hidden byte rec_act, rec_call, rec_outcome;
#define ACT(act, call, outcome)                                                                     \
    rec_act = act;                                                                                  \
    rec_call = call;                                                                                \
    rec_outcome = outcome;                                                                          \
    c_code { record_action(rec_act, rec_call, rec_outcome); }

#define REC_STATE                                                                                   \
    c_code {                                                                                        \
        record(Prank->runs); record(Prank->pause); record(Prank->sole); record(Prank->calls);       \
        record(Prank->more); record(Prank->phase); record(Prank->committing);                       \
        record(Prank->update_call); record(Prank->gates); record(Prank->session);                   \
        record(Prank->configured); record(Prank->weights);                                          \
        for (int f = 0; f < F; f++) { record(Prank->done[f]); record(Prank->done_life[f]); }        \
    }
#define REC_BEFORE                                                                                  \
    c_code {                                                                                        \
        record_begin(); record(N); record(F); record(C); record(LOCKSTEP); record(SHADOW);          \
        record(Prank->me);                                                                          \
    };                                                                                              \
    REC_STATE;                                                                                      \
    c_code {                                                                                        \
        record(Prank->result); record(Prank->verdict); record(Prank->ended);                        \
        record(Prank->update_call == 0 ? 0 : now.op[Prank->update_call - 1] >> 3);                  \
        record(now.slot[Prank->pos].idle); record(now.slot[Prank->pos].quiet);                      \
        record(now.slot[Prank->pos].expired); record(now.slot[Prank->pos].clean);                   \
        record(now.slot[Prank->pos].content); record(now.slot[Prank->pos].most);                    \
        for (int f = 0; f < F; f++) {                                                               \
            record(now.slot[Prank->pos].gen[f]); record(now.slot[Prank->pos].top[f]);               \
            record(now.slot[Prank->pos].seen[f]); record(now.slot[Prank->pos].ok[f]);               \
            record(Prank->voted[f] - Prank->done[f]);                                               \
            for (int n = Prank->done[f]; n < Prank->voted[f]; n++) { record(now.op[f * C + n]); }   \
        }                                                                                           \
    }
#define REC_AFTER                                                                                   \
    REC_STATE;                                                                                      \
    c_code { record_end(); }
