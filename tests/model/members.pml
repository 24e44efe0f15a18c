/* members.pml: with RECORD, each different decision of the coordinator becomes a row (record.h), which members.c
 * repeats with the real one. Not with LATE_WORD or what takes a rule of the coordinator out. */
c_decl {
\#include "record.h"
}
#define ACT_INIT     1 /* rank */
#define ACT_DISSOLVE 2 /* epoch */
#define ACT_REFUSE   3 /* rank */
hidden byte rec_kind, rec_rank, rec_act, rec_x;
#define ACT(act, x)                                                                                 \
    rec_act = act;                                                                                  \
    rec_x = x;                                                                                      \
    c_code { record_action(rec_act, rec_x, 0); }

#define REC_STATE                                                                                   \
    c_code {                                                                                        \
        record(now.phase); record(now.G); record(now.newest); record(now.newest_left);              \
        record(now.rev); record(now.said); record(now.rec_removed);                                 \
        record(now.G == 0 ? 0 : now.init_floor[now.G]);                                             \
        for (int r = 0; r < N; r++) {                                                               \
            record(now.rec[r]); record(now.rec_gen[r]); record(now.rec_address[r]);                 \
            record(now.rec_member[r]); record(now.init_members[now.rec_member[r]]);                 \
            record(now.rec_ready[r]); record(now.expelled[r]);                                      \
        }                                                                                           \
    }
/* kind: 1 HELLO, 2 READY, 3 silence, 4 removal of a rank, 5 a front end's word */
#define REC_BEFORE(kind, rank)                                                                      \
    rec_kind = kind;                                                                                \
    rec_rank = rank;                                                                                \
    c_code {                                                                                        \
        record_begin(); record(-1); record(N); record(rec_kind); record(rec_rank);                  \
        record(a1); record(a2); record(a3); record(a4); record(a5); record(a6); record(a7);         \
        record(now.init_members[a4 < EPOCHS ? a4 : 0]); record(now.known);                          \
        record(now.known_weights);                                                                  \
    };                                                                                              \
    REC_STATE
#define REC_AFTER                                                                                   \
    REC_STATE;                                                                                      \
    c_code { record_end(); }
