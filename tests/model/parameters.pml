/*
 * parameters.pml: what a model is made of, with its defaults, and the rows' guards.
 */
#ifndef N
#define N 2 /* ranks */
#endif
#ifndef F
#define F 2 /* front ends */
#endif
#ifndef C
#define C 2 /* commands of each life of a front end, at most */
#endif
#ifndef C1
#define C1 C /* of front end 1 */
#endif
#ifndef LIVES
#define LIVES 1 /* of front end 0 */
#endif
#ifndef K
#define K 1 /* --dp-sync-interval */
#endif
#ifndef LENGTH
#define LENGTH 1 /* steps that a request takes at most */
#endif
#ifndef REQUESTS
#define REQUESTS 1 /* of each rank below BUSY */
#endif
#ifndef BUSY
#define BUSY N
#endif
#ifndef LOCKSTEP
#define LOCKSTEP 1
#endif
#ifndef SHADOW
#define SHADOW 0
#endif
#ifndef FAULTS
#define FAULTS 0 /* things that go wrong on single ranks */
#endif
#ifndef CONFIGURED
#define CONFIGURED 0 /* 1: a transfer engine is initialised from the beginning */
#endif
#ifndef OPS0
#define OPS0 (MAY_KEEP | MAY_RESUME)
#endif
#ifndef OPS1
#define OPS1 OPS0
#endif

/* what a front end may send */
#define MAY_KEEP    1
#define MAY_ABORT   2
#define MAY_WAIT    4
#define MAY_RESUME  8
#define MAY_CANCEL  16
#define MAY_VERB(v) (16 << (v))
#define MAY_SCRIPT  2048 /* front end 0: the weight calls of SCRIPT, in order */

#define mask_t short /* a bit per call */

#define STREAMS       (LIVES * F)
#define CALLS         (STREAMS * C)
#define STREAM(l, f)  (((l) - 1) * F + (f))
#define CALL(l, f, n) (STREAM(l, f) * C + (n) - 1)
#define ALL           ((1 << N) - 1)
#define ADDS(r)       ((r) < BUSY -> REQUESTS : 0)
#define LOWER(x, y)   x = ((y) < x -> (y) : x)
#define RAISE(x, y)   x = ((y) > x -> (y) : x)
#define WORK          (wait + rem > 0)

#define PAUSE_NEXT(s, e)                                                                            \
    (((s == 0 -> PAUSE_NEXT_0 : (s == 1 -> PAUSE_NEXT_1 : PAUSE_NEXT_2)) >> (2 * (e))) & 3)
#define PAUSE_EFFECTS(s, e)                                                                         \
    (((s == 0 -> PAUSE_EFFECTS_0 : (s == 1 -> PAUSE_EFFECTS_1 : PAUSE_EFFECTS_2)) >> (4 * (e))) & 15)

/* ---- applying commands ---- */

#ifdef NO_R4
#define MIN_SEEN(f) voted[f]
#else
#define MIN_SEEN(f) slot[p].seen[f]
#endif
#ifdef NO_R21
#define AGREED(f) (slot[p].gen[f] != 0)
#else
#define AGREED(f) (slot[p].gen[f] == slot[p].top[f] && slot[p].gen[f] != 0)
#endif
#define CAN_APPLY     (phase == UPDATE_NONE || phase == UPDATE_BESIDE)
#define HOLDS_UPDATES (i == owed_f || phase == UPDATE_BESIDE)

/* ---- R19 taken out: a PAUSE stops this rank's requests when it is received ---- */

#ifdef NO_R19
#define LOCAL_DECL   bit frozen;
#define LOCAL_STOP   frozen = 1
#define LOCAL_LIFT   frozen = 0
#define LOCAL_FREEZE frozen
#else
#ifdef NO_R3
#define LOCAL_DECL bit skipped;
#else
#define LOCAL_DECL
#endif
#define LOCAL_STOP   skip
#define LOCAL_LIFT   skip
#define LOCAL_FREEZE 0
#endif

/* ---- rows ---- */

#ifdef UPDATES
#define AWAKE (!in_step && !posted && phase != UPDATE_CARRYING && !in_update)
#else
#define AWAKE (!in_step && !posted)
#endif

#ifdef NO_R10
#define UNVOTED(f) (heard[f] != voted_life[f] || seen[f] > done[f])
#else
#define UNVOTED(f) (heard[f] != voted_life[f] || seen[f] > voted[f])
#endif
#if F > 1
#define UNVOTED_ANY (UNVOTED(0) || UNVOTED(1))
#else
#define UNVOTED_ANY UNVOTED(0)
#endif

#ifdef UPDATES
#define GATED     (gates != 0)
#define DIRTY     ((gates & GATE_DIRTY) != 0)
#define NEWS_MORE                                                                                   \
    || (phase == UPDATE_BESIDE && ended && !voted_ended)                                            \
    || (EXPIRED && !voted_expired)
#else
#define GATED     0
#define DIRTY     0
#define NEWS_MORE
#endif

#ifdef NO_R9
#define NEWS 0
#else
#define NEWS                                                                                        \
    (UNVOTED_ANY                                                                                    \
     || (pause == PS_DRAINING && !(LOCKSTEP && runs) && rem == 0 && !voted_quiet) NEWS_MORE)
#endif

/* level, or edge */
#ifdef NO_R11
#define WORK_OPENS (LOCKSTEP && news_add)
#define ON_ADD     news_add = (pause == PS_RUNNING)
#else
#define WORK_OPENS (LOCKSTEP && WORK && pause == PS_RUNNING && !GATED)
#define ON_ADD     skip
#endif

#ifdef STARTS
#define JOINS (invited[me] & CURRENT)
#else
#ifdef NO_R12
#define JOINS 0
#else
#ifdef NO_R13
#define JOINS (slot[pos].kind == ROUND && pause != PS_STOPPED)
#else
#define JOINS (slot[pos].kind == ROUND)
#endif
#endif
#endif

#ifdef NO_R2
#define DUE (sc >= K || !WORK)
#else
#define DUE (sc >= K)
#endif

#ifdef NO_R1
#define WAKES_ITSELF (LOCKSTEP && !runs && WORK && pause == PS_RUNNING)
#else
#define WAKES_ITSELF 0
#endif

#define NEXT_IS_VOTE                                                                                \
    (AWAKE                                                                                          \
     && (phase == UPDATE_OWED || more                                                               \
         || (LOCKSTEP && runs -> DUE : (WORK_OPENS || JOINS || NEWS))))
#define NEXT_IS_STEP                                                                                \
    (AWAKE && phase != UPDATE_OWED && !more                                                         \
     && (LOCKSTEP -> (runs && sc < K) || WAKES_ITSELF                                                \
                  : (runs && !JOINS && !NEWS && (rem > 0 || (wait > 0 && pause == PS_RUNNING)))))
#define STEP_COMPLETE (!LOCKSTEP || slot[pos].entered == N)

#ifdef NO_R20
#define EXCLUDED(f) 0
#else
#define EXCLUDED(f) UPDATE_EXCLUDES(f)
#endif
#ifndef UPDATES
#define UPDATE_EXCLUDES(f) 0
#endif
#define CAN_RECEIVE(f)                                                                              \
    (!(missed & (1 << (f)))                                                                         \
     && seen[f] < sent[STREAM((heard[f] == 0 -> 1 : heard[f]), f)] && !EXCLUDED(f))

#ifndef RECORD
#define REC_BEFORE skip
#define REC_AFTER  skip
#endif
