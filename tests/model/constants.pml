/* constants.pml: printed by constants.c from the code's headers. Not written by hand. */
#define CMD_PAUSE                1
#define CMD_RESUME               2
#define CMD_CANCEL               3
#define CMD_UPDATE               4
#define PAUSE_ABORT              1
#define PAUSE_KEEP               2
#define PAUSE_WAIT               3
#define GATE_SESSION             1
#define GATE_DIRTY               2
#define GATE_ASLEEP              4
#define UPDATE_NONE              0
#define UPDATE_CARRYING          1
#define UPDATE_BESIDE            2
#define UPDATE_OWED              3
#define VOTE_OK                  255
#define VOTE_PENDING             0
#define VOTE_FAILED              245
#define VERB_INIT                1
#define VERB_START               2
#define VERB_UPDATE              3
#define VERB_FINISH              4
#define VERB_ABORT               5
#define VERB_SET_VERSION         6
#define ACT_SEEN                 0
#define ACT_REPEAT               1
#define ACT_DONE                 2
#define ACT_FINISH_ALL           3
#define ACT_CLEAR_CACHE          4
#define ACT_UPDATE_ENTER         5
#define ACT_UPDATE_COMMIT        6
#define ACT_UPDATE_OUTCOME       7
#define ACT_SESSION_CLOSE        8
#define ACT_PUBLISH              9
#define ACT_RELABEL              10
#define ACT_DIRTY                11
#define ACT_REPORT               12
#define ACT_ANNOUNCE             13

/* where the entries begin, of a front ends */
#define VEC_IDLE                 0
#define VEC_QUIET                1
#define VEC_TAG                  2
#define VEC_NTAG                 3
#define VEC_GEN(a) (0 * (a) + 4)
#define VEC_NGEN(a) (1 * (a) + 4)
#define VEC_SEEN(a) (2 * (a) + 4)
#define VEC_OK(a) (3 * (a) + 4)
#define VEC_EXPIRED(a) (4 * (a) + 4)
#define VEC_CLEAN(a) (4 * (a) + 5)
#define VEC_CONTENT(a) (4 * (a) + 6)
#define VEC_NCONTENT(a) (4 * (a) + 7)
#define VEC_CANCEL(a) (4 * (a) + 8)
#define VEC_LEN(a) (5 * (a) + 8)

/* pause: per state, 2 bits of next state and 4 bits of effects per event */
#define PS_RUNNING               0
#define PS_DRAINING              1
#define PS_STOPPED               2
#define EV_ABORT                 0
#define EV_KEEP                  1
#define EV_WAIT                  2
#define EV_RESUME                3
#define EV_CANCEL_SOLE           4
#define EV_CANCEL_OTHER          5
#define EV_QUIET                 6
#define PAUSE_FINISH_ALL         1
#define PAUSE_LIFT               2
#define PAUSE_NEW_EPOCH          4
#define PAUSE_IMPOSSIBLE         8
#define PAUSE_NEXT_0             26
#define PAUSE_EFFECTS_0          541765
#define PAUSE_NEXT_1             9242
#define PAUSE_EFFECTS_1          418885
#define PAUSE_NEXT_2             10282
#define PAUSE_EFFECTS_2          418885

/* admitted verbs: bit 4 * dirty + 2 * session + configured; awake */
#define ADMIT_1                  255
#define ADMIT_2                  34
#define ADMIT_3                  204
#define ADMIT_4                  204
#define ADMIT_5                  255
#define ADMIT_6                  255

/* enrolment: per event, 3 bits of next state per state, and 9 bits of actions from
 * CALLING on */
#define E_OUTSIDE                0
#define E_CALLING                1
#define E_CONNECTING             2
#define E_MEMBER                 3
#define E_ENDED                  4
#define E_LEAVE                  1
#define E_HELLO                  2
#define E_CONNECT                4
#define E_RELINK                 8
#define E_FORM                   16
#define E_SAY_READY              32
#define E_HERE                   64
#define E_END                    128
#define E_IMPOSSIBLE             256
#define E_NEXT_LOADED            18057
#define E_DOES_LOADED            67240192
#define E_NEXT_INIT_NEW          16976
#define E_DOES_INIT_NEW          787972
#define E_NEXT_INIT_SAME         18056
#define E_DOES_INIT_SAME         2101248
#define E_NEXT_INIT_AGAIN        18056
#define E_DOES_INIT_AGAIN        8388608
#define E_NEXT_CONNECTED         18120
#define E_DOES_CONNECTED         67166464
#define E_NEXT_LOST              16968
#define E_DOES_LOST              787968
#define E_NEXT_REFUSED           18724
#define E_DOES_REFUSED           33620096
#define E_NEXT_ROLLCALL          17992
#define E_DOES_ROLLCALL          8914434
#define E_NEXT_TICK              18056
#define E_DOES_TICK              17302530

/* the coordinator, and its record of a rank */
#define M_GATHERING              0
#define M_CONNECTING             1
#define M_SERVING                2
#define REC_NEW                  0
#define REC_HELLO                1
#define REC_INITED               2
#define REC_READY                3
