/*
 * membership.pml: group epochs, from docs/MEMBERSHIP.md: the coordinator (M), the enrolment of each rank (E,
 * whose table is the code's), what front ends pass on, the facts of the join rounds (J) and an update
 * that a death may cut anywhere. DEATHS processes of ranks are killed and started again by their
 * launcher, STOPS are stopped, and woken or killed, REMOVES are not started again, RESTARTS are the
 * coordinator's, LOSSES messages are lost between living processes. What is said arrives in order;
 * what is under way to a process that ends is lost, and what is under way from it may be.
 */
#include "constants.pml"
#include "settings.pml"
#ifndef N
#define N 2
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef STOPS
#define STOPS 0
#endif
#ifndef REMOVES
#define REMOVES 0
#endif
#ifndef RESTARTS
#define RESTARTS 0
#endif
#ifndef LOSSES
#define LOSSES 0
#endif
#ifndef UPDATES
#define UPDATES 0
#endif
#ifndef SHADOW
#define SHADOW 0
#endif
#ifndef PAUSES
#define PAUSES 0
#endif
#define EPOCHS  10 /* no search comes to more: asserted */
#define NUMBERS 16 /* of weights, likewise */
#define SKIP    3  /* GROUP_EPOCH_SKIP */

mtype = { HELLO, IS_READY, INIT, DISSOLVE, ROLLCALL, REFUSED };
/* generation, address, left, member of, heard, newest weights, revision */
chan up[N] = [4] of { mtype, byte, byte, byte, byte, byte, byte, byte };
chan down[N] = [6] of { mtype, byte, byte }; /* epoch, revision */

/* ranks: `epoch` is the one it is in or enters, else the newest it was told of */
byte gen[N], state[N], epoch[N], left[N], address[N], revision[N];
byte stopped, removed, joined, open, paused, dirty, undecided; /* a bit per rank */
byte content[N], weights[N], taken[N]; /* what it holds; its weight epoch; the last number given */
/* facts, frozen when a rank forms an epoch */
byte fact_content[N], fact_weights[N], fact_taken[N], fact_dirty, fact_undecided, fact_paused;

/* the coordinator; newest: weight epoch ever reported, newest_left: epoch ever heard of */
byte G, phase = M_GATHERING, newest, newest_left, rev;
byte rec[N], rec_gen[N], rec_address[N], rec_member[N], rec_ready[N], expelled[N];
byte rec_removed, told; /* told: removals that the launcher has said, to whichever life */
byte said; /* 1 + the epoch of a front end's HELLO */
byte init_gen[N * EPOCHS], init_address[N * EPOCHS], init_floor[EPOCHS], init_members[EPOCHS];

/* front ends: newest epoch and weights that they have heard of */
byte known, known_weights;

#define IDLE      0
#define RECEIVED  1
#define COMMITTED 2
byte stage[N]; /* of an update */
byte sets;     /* sets of weights that a trainer has sent; 0 is the checkpoint */

/* ghosts */
short lived;         /* epochs that had a member */
byte served;         /* newest weights that ranks stepped with */
byte set_of[NUMBERS]; /* the set that was published under this number */
byte last_number;
byte unnamed; /* ranks of an epoch without a reference */

byte deaths, stops, removes, restarts, losses, repeats;
bit pause_called, pause_answered;

hidden byte i, j, e, ref, doing, top;
hidden byte a1, a2, a3, a4, a5, a6, a7;
hidden byte was_in, new_life;

#ifdef RECORD
#include "members.pml"
#else
#define REC_BEFORE(kind, rank) skip
#define REC_AFTER              skip
#define ACT(act, x)            skip
#endif

#define BIT(r)          (1 << (r))
#define AT(g, r)        ((g) * N + (r))
#define RAISE(x, y)     x = ((y) > x -> (y) : x)
#define ALIVE(r)        (state[r] != E_OUTSIDE && !(stopped & BIT(r)))
#define INSIDE(r)       (state[r] == E_CONNECTING || state[r] == E_MEMBER)
/* who has another address by now may be connected to, or not */
#ifdef ANY_ADDRESS
#define SAME_LIFE(g, r) (gen[r] == init_gen[AT(g, r)] && left[r] < (g))
#else
#define SAME_LIFE(g, r) (gen[r] == init_gen[AT(g, r)] && address[r] == init_address[AT(g, r)])
#endif
#define IN(g, r)        (SAME_LIFE(g, r) && INSIDE(r) && epoch[r] == (g))
#define GONE(g, r)      (!SAME_LIFE(g, r) || state[r] == E_OUTSIDE || (stopped & BIT(r)))
#define ALL             ((1 << N) - 1)
#define SIZE(mask)      (((mask) & 1) + (((mask) >> 1) & 1) + (((mask) >> 2) & 1))
#define HAS(mask, r)    (((mask) >> (r)) & 1)
#if N == 2
#define EVERY(mask, x) ((!HAS(mask, 0) || x(0)) && (!HAS(mask, 1) || x(1)))
#define SOME(mask, x)  ((HAS(mask, 0) && x(0)) || (HAS(mask, 1) && x(1)))
#else
#define EVERY(mask, x)                                                                              \
    ((!HAS(mask, 0) || x(0)) && (!HAS(mask, 1) || x(1)) && (!HAS(mask, 2) || x(2)))
#define SOME(mask, x) ((HAS(mask, 0) && x(0)) || (HAS(mask, 1) && x(1)) || (HAS(mask, 2) && x(2)))
#endif
#define MEMBERS   init_members[epoch[me]] /* of the epoch that I am in or enter */
#define ONE_DEATH (DEATHS == 1 && STOPS == 0)
#ifdef WITNESSES
#define ONE_WITNESS 1
#else
#define ONE_WITNESS ONE_DEATH
#endif

/* ---- front ends ---- */

/* With WITNESSES front ends hear late, and the last who knows the newest epoch or weights does not
 * die: then their numbers are lost, and may be given again. */
#ifdef WITNESSES
#define KNOWS(r)     (state[r] != E_OUTSIDE && (1 << (epoch[r] + 1)) > lived)
#define KNOWS_SET(r) (state[r] != E_OUTSIDE && (taken[r] >= last_number || (stage[r] == COMMITTED && taken[r] + 1 >= last_number)))
#define OTHER_KNOWS(r)     ((r) != me && KNOWS(r))
#define OTHER_KNOWS_SET(r) ((r) != me && KNOWS_SET(r))
#define FRONT_KNOWS        ((1 << (known + 1)) > lived)
#define MAY_DIE(r)                                                                                  \
    ((SOME(ALL, OTHER_KNOWS) || FRONT_KNOWS || (1 << (G + 1)) > lived)                              \
     && (SOME(ALL, OTHER_KNOWS_SET) || known_weights >= last_number || newest >= last_number))
#define MAY_RESTART                                                                                 \
    ((SOME(ALL, KNOWS) || FRONT_KNOWS) && (SOME(ALL, KNOWS_SET) || known_weights >= last_number))
#define FRONT_ROWS(r)                                                                               \
    :: d_step { state[r] == E_MEMBER && known < epoch[r] -> known = epoch[r] }
/* what a front end says is there before a process is started again; LATE_WORD: or later */
#ifdef LATE_WORD
#define FRONT_HAS_SAID 1
#else
#define FRONT_HAS_SAID (said == 0 || said == known + 1)
#endif
#else
#define FRONT_HAS_SAID 1
#define MAY_DIE(r)  1
#define MAY_RESTART 1
#define FRONT_ROWS(r)
#endif

#ifdef NO_FRONT_FLOOR
#define PASSED_ON 0
#else
#define PASSED_ON known_weights
#endif

/* ---- E: a rank ---- */

#ifdef NO_HEARD
#define HEARD_EPOCH left[me]
#else
#define HEARD_EPOCH epoch[me]
#endif

inline say_hello()
{
    top = (init_floor[epoch[me]] > weights[me] -> init_floor[epoch[me]] : weights[me]);
    up[me] ! HELLO, gen[me], address[me], left[me], (state[me] == E_MEMBER -> epoch[me] : 0),
        HEARD_EPOCH, top, revision[me]
}

/* The epoch is over here. A commit whose outcome is not known may have been published elsewhere. */
inline leave()
{
    left[me] = epoch[me];
    address[me]++;
    joined = joined & ~BIT(me);
    open = open & ~BIT(me);
#ifndef NO_TAKEN
    if
    :: stage[me] == COMMITTED -> taken[me]++
    :: else -> skip
    fi;
#endif
    stage[me] = IDLE
}

/* Ends, and with it what was under way to it. */
inline end_process()
{
    state[me] = E_OUTSIDE;
    joined = joined & ~BIT(me);
    open = open & ~BIT(me);
    paused = paused & ~BIT(me);
    dirty = dirty & ~BIT(me);
    undecided = undecided & ~BIT(me);
    stopped = stopped & ~BIT(me);
    stage[me] = IDLE;
    content[me] = 0;
    weights[me] = 0;
    taken[me] = 0;
    do
    :: nempty(down[me]) -> down[me] ? a1, a2, a3
    :: empty(down[me]) -> break
    od;
    epoch[me] = 0;
    left[me] = 0;
    revision[me] = 0
}

inline begin_process()
{
    gen[me]++;
    address[me]++;
    state[me] = E_CALLING; /* its weights, the launcher's checkpoint, are loaded */
    say_hello()
}

/* Experts are spread over the members: with another number of them each opens its executor anew. */
inline connect()
{
    if
    :: left[me] != 0 && SIZE(MEMBERS) != SIZE(init_members[left[me]]) ->
        content[me] = 0;
        weights[me] = 0;
        dirty = dirty & ~BIT(me);
        undecided = undecided & ~BIT(me)
    :: else -> skip
    fi
}

inline form()
{
    lived = lived | BIT(epoch[me]);
#ifndef WITNESSES
    if /* HERE is heard at once, and what it says passed on */
    :: epoch[me] > known ->
        known = epoch[me];
        said = (said == 0 -> 0 : known + 1);
        RAISE(newest_left, known)
    :: else -> skip
    fi;
#endif
    fact_content[me] = content[me];
    fact_weights[me] = weights[me];
    fact_taken[me] = taken[me];
    fact_dirty = (fact_dirty & ~BIT(me)) | (dirty & BIT(me));
    fact_undecided = (fact_undecided & ~BIT(me)) | (undecided & BIT(me));
    fact_paused = (fact_paused & ~BIT(me)) | (paused & BIT(me))
}

/* What the table says, in the order of its bits. */
inline take(next, does)
{
    doing = (does >> (9 * (state[me] - E_CALLING))) & 511;
    assert(!(doing & E_IMPOSSIBLE));
    state[me] = (next >> (3 * state[me])) & 7;
    if
    :: doing & E_LEAVE -> leave()
    :: else -> skip
    fi;
    if
    :: doing & E_HELLO -> say_hello()
    :: else -> skip
    fi;
    if
    :: doing & E_CONNECT -> connect()
    :: else -> skip
    fi;
    if
    :: doing & E_FORM -> form()
    :: else -> skip
    fi;
    if
    :: doing & E_SAY_READY -> up[me] ! IS_READY, epoch[me], gen[me], 0, 0, 0, 0, 0
    :: else -> skip
    fi;
    if
    :: doing & E_END -> end_process()
    :: else -> skip
    fi
}

/* J: from the facts of all members, the same on every rank. */
inline join()
{
    e = init_floor[epoch[me]];
    top = e;
    for (i : 0 .. N - 1) {
        if
        :: HAS(MEMBERS, i) -> RAISE(e, fact_weights[i]); RAISE(top, fact_taken[i])
        :: else -> skip
        fi
    }
    ref = N;
    for (i : 0 .. N - 1) {
#ifdef NO_UNDECIDED
        ref = (ref == N && HAS(MEMBERS, i) && fact_weights[i] == e -> i : ref)
#else
        ref = (ref == N && HAS(MEMBERS, i) && fact_weights[i] == e
               && !((fact_dirty | fact_undecided) & BIT(i)) -> i : ref)
#endif
    }
    j = ref != N;
    for (i : 0 .. N - 1) {
#ifdef NO_CONTENT
        skip
#else
        j = j && (!HAS(MEMBERS, i)
                  || (fact_content[i] == fact_content[ref % N] && !(fact_dirty & BIT(i))))
#endif
    }
#ifdef NO_SKIP
    weights[me] = e;
#else
    weights[me] = (ref == N -> e + SKIP : e);
#endif
#ifdef NO_TAKEN
    taken[me] = weights[me];
#else
    taken[me] = (weights[me] > top -> weights[me] : top);
#endif
    undecided = undecided & ~BIT(me);
    unnamed = (ref == N -> unnamed | BIT(me) : unnamed & ~BIT(me));
    if
    :: j -> open = open | BIT(me)
    :: else -> dirty = dirty | BIT(me) /* in lockstep the gate is set on all */
    fi;
#ifndef NO_PAUSE_FACT
    if
    :: fact_paused & MEMBERS -> paused = paused | BIT(me)
    :: else -> skip
    fi;
#endif
    joined = joined | BIT(me);
    for (i : 0 .. N - 1) {
        if
        :: j && (open & BIT(i)) && epoch[i] == epoch[me] ->
            assert(content[i] == content[me]) /* who steps together holds the same weights */
        :: else -> skip
        fi
    }
    assert(!j || set_of[weights[me]] == content[me]); /* those that the epoch names */
    assert(!j || !ONE_WITNESS || weights[me] >= served);
    assert(!pause_answered || !ONE_DEATH || (paused & BIT(me)));
    i = 0
}
#define PEER_GONE(r)     ((r) != me && GONE(epoch[me], r))
#define PEER_IN(r)       IN(epoch[me], r)
#define PEER_MEMBER(r)   (IN(epoch[me], r) && state[r] == E_MEMBER)
#define PEER_JOINED(r)   (PEER_MEMBER(r) && (joined & BIT(r)))
#define PEER_LEVEL(r)    (weights[r] == weights[me] && stage[r] != COMMITTED)
#define PEER_IDLE(r)     (stage[r] == IDLE)
#define PEER_RECEIVED(r) (weights[r] == weights[me] && stage[r] != IDLE)
#define PEER_TOOK(r)     (stage[r] == COMMITTED || weights[r] > weights[me])
#define PEER_EQUAL(r)    (weights[r] == weights[me])
#define PEER_PAUSED(r)   (PEER_JOINED(r) && (paused & BIT(r)))
#define TOGETHER         (ALIVE(me) && state[me] == E_MEMBER && EVERY(MEMBERS, PEER_JOINED))
#define NEXT_NUMBER      (taken[me] + 1)

/* An update in place: received by all, then committed by each, then published by each. With shadow
 * swap the live weights are not touched before they are published. */
inline receive()
{
    if
    :: EVERY(MEMBERS, PEER_IDLE) -> sets++
    :: else -> skip
    fi;
    stage[me] = RECEIVED;
    if
    :: SHADOW -> skip
    :: else ->
        open = open & ~BIT(me);
        dirty = dirty | BIT(me)
    fi
}

inline commit()
{
    stage[me] = COMMITTED;
    if
    :: SHADOW -> skip
    :: else ->
        content[me] = sets;
        dirty = dirty & ~BIT(me);
        undecided = undecided | BIT(me)
    fi
}

inline publish()
{
    stage[me] = IDLE;
    content[me] = sets;
    weights[me] = NEXT_NUMBER;
    taken[me] = weights[me];
    assert(weights[me] < NUMBERS - SKIP);
    /* one number, one set; without a witness only if the newest number that anybody heard of is lost */
    assert(set_of[weights[me]] == 0 || set_of[weights[me]] == sets ||
           !(ONE_WITNESS || (unnamed & BIT(me))));
    set_of[weights[me]] = sets;
    RAISE(last_number, weights[me]);
    dirty = dirty & ~BIT(me);
    undecided = undecided & ~BIT(me);
    open = open | BIT(me);
    if
    :: EVERY(MEMBERS, PEER_EQUAL) -> RAISE(served, weights[me]) /* a step needs all */
    :: else -> skip
    fi
}

/* Nothing goes on any more: all ranks are in the coordinator's epoch. */
inline check_rest()
{
    if
    :: removed & BIT(me) -> assert(state[me] == E_OUTSIDE && !HAS(init_members[G], me))
    :: else ->
        assert(state[me] == E_MEMBER && epoch[me] == G && phase == M_SERVING);
        assert(known <= G); /* else front ends would drop what is of this epoch */
        assert(joined & BIT(me));
        assert(!pause_called || (paused & BIT(me)));
        assert(rec[me] == REC_READY && rec_gen[me] == gen[me])
    fi
}

inline be_dissolved()
{
    down[me] ? DISSOLVE, a1, a2;
    if
    :: a1 >= epoch[me] -> take(E_NEXT_LOST, E_DOES_LOST)
    :: else -> skip
    fi
}

inline be_placed()
{
    down[me] ? INIT, a1, a2;
    if
    :: a1 < epoch[me] || (!INSIDE(me) && a1 <= left[me]) -> skip /* late */
#ifndef NO_OWN_ADDRESS
    :: !INSIDE(me) && address[me] != init_address[AT(a1, me)] -> skip /* for an earlier attempt */
#endif
    :: else ->
        if
        :: INSIDE(me) && a1 == epoch[me] ->
            new_life = a2 != revision[me];
            revision[me] = a2;
            if
            :: new_life -> take(E_NEXT_INIT_SAME, E_DOES_INIT_SAME)
            :: else -> take(E_NEXT_INIT_AGAIN, E_DOES_INIT_AGAIN)
            fi
        :: else ->
            if
            :: INSIDE(me) -> skip
            :: else ->
                assert(gen[me] == init_gen[AT(a1, me)]); /* it was made for this life */
                epoch[me] = a1;
                revision[me] = a2
            fi;
            take(E_NEXT_INIT_NEW, E_DOES_INIT_NEW)
        fi
    fi
}

/* Each second: what is said again does something only then. (REPEATS times also when it does not.) */
#define STALE                                                                                       \
    (rec_gen[me] != gen[me] || rec_address[me] != address[me] || rec[me] == REC_NEW                 \
     || (rec[me] == REC_INITED && !(state[me] == E_CONNECTING && epoch[me] == G))                                      \
     || (rec[me] == REC_HELLO && state[me] == E_MEMBER && rec_member[me] != epoch[me])              \
     || (rec[me] == REC_READY && revision[me] != rev))
#define AGAIN (empty(up[me]) && empty(down[me]) && STALE)
#ifdef NO_REPEAT
#define SAYS_AGAIN (state[me] == E_CALLING && AGAIN)
#else
#define SAYS_AGAIN AGAIN
#endif

proctype rank(byte me)
{
end:
    do
    :: d_step { state[me] == E_OUTSIDE && !(removed & BIT(me)) && nfull(up[me]) && FRONT_HAS_SAID ->
        begin_process() }
    :: d_step { ALIVE(me) && SAYS_AGAIN -> take(E_NEXT_TICK, E_DOES_TICK) }
#ifdef REPEATS
    :: d_step { ALIVE(me) && repeats < REPEATS && empty(up[me]) ->
        repeats++; take(E_NEXT_TICK, E_DOES_TICK) }
#endif
    :: d_step { ALIVE(me) && nempty(down[me]) && len(up[me]) <= 2 && down[me] ? [INIT, _, _] -> be_placed() }
    :: d_step { ALIVE(me) && nempty(down[me]) && len(up[me]) <= 2 && down[me] ? [DISSOLVE, _, _] -> be_dissolved() }
    :: d_step { ALIVE(me) && nempty(down[me]) && len(up[me]) <= 2 && down[me] ? [ROLLCALL, _, _] ->
        down[me] ? ROLLCALL, a1, a2; take(E_NEXT_ROLLCALL, E_DOES_ROLLCALL) }
    :: d_step { ALIVE(me) && nempty(down[me]) && down[me] ? [REFUSED, _, _] ->
        down[me] ? REFUSED, a1, a2; take(E_NEXT_REFUSED, E_DOES_REFUSED) }
    :: d_step { ALIVE(me) && state[me] == E_CONNECTING && EVERY(MEMBERS, PEER_IN) && nfull(up[me]) ->
        take(E_NEXT_CONNECTED, E_DOES_CONNECTED) }
    :: d_step { ALIVE(me) && INSIDE(me) && SOME(MEMBERS, PEER_GONE) && nfull(up[me]) ->
        take(E_NEXT_LOST, E_DOES_LOST) }
    :: d_step { ALIVE(me) && state[me] == E_MEMBER && !(joined & BIT(me)) && EVERY(MEMBERS, PEER_MEMBER) -> join() }
#if UPDATES
    :: d_step { TOGETHER && stage[me] == IDLE && EVERY(MEMBERS, PEER_LEVEL) &&
                (sets < UPDATES || !EVERY(MEMBERS, PEER_IDLE)) -> receive() }
    :: d_step { TOGETHER && stage[me] == RECEIVED && EVERY(MEMBERS, PEER_RECEIVED) -> commit() }
    :: d_step { TOGETHER && stage[me] == COMMITTED && EVERY(MEMBERS, PEER_TOOK) -> publish() }
    :: d_step { (joined & BIT(me)) && newest < weights[me] -> newest = weights[me] }
#endif
    :: d_step { TOGETHER && pause_called && !(paused & BIT(me)) -> paused = paused | BIT(me);
        pause_answered = pause_answered || EVERY(MEMBERS, PEER_PAUSED) }
    /* what may happen to a process */
    :: d_step { state[me] != E_OUTSIDE && deaths < DEATHS && MAY_DIE(me) -> deaths++; end_process() }
    :: d_step { ALIVE(me) && stops < STOPS -> stops++; stopped = stopped | BIT(me) }
    :: d_step { (stopped & BIT(me)) -> stopped = stopped & ~BIT(me) }
    :: d_step { (stopped & BIT(me)) -> end_process() }
#if REMOVES
    :: d_step { state[me] == E_OUTSIDE && removes < REMOVES && gen[me] > 0 && !(removed & BIT(me)) ->
        removes++; removed = removed | BIT(me) }
#endif
    :: timeout -> d_step { check_rest(); i = 0 }; break
    od
}

/* ---- M: the coordinator ---- */

#define RANKS           (ALL & ~rec_removed)
#define IS_HERE(r)      (rec[r] >= REC_HELLO)
#define IS_READY_NOW(r) (rec[r] == REC_READY)
#define IN_EPOCH(r)     (rec[r] == REC_INITED || rec[r] == REC_READY)
#define NO_MEMBER(r)    (rec_member[r] == 0)
#define SAME_GROUP(r)   (rec_member[r] == e && rec_member[r] != 0 && SIZE(init_members[e]) == SIZE(RANKS))
#define ROOM(r)         (len(down[r]) <= 3)

/* To the life that is recorded; one that is not there any more is an unknown peer. */
inline tell(r, what, g)
{
    if
    :: state[r] != E_OUTSIDE && gen[r] == rec_gen[r] -> down[r] ! what, g, rev
    :: else -> skip
    fi
}

inline dissolve(g)
{
    ACT(ACT_DISSOLVE, g);
    for (j : 0 .. N - 1) {
        tell(j, DISSOLVE, g)
    }
    j = 0
}

inline break_epoch()
{
    if
    :: phase != M_GATHERING ->
        phase = M_GATHERING;
        for (j : 0 .. N - 1) {
            rec[j] = (IN_EPOCH(j) -> REC_NEW : rec[j])
        }
        dissolve(G)
    :: else -> skip
    fi
}

inline dissolve_found()
{
    for (j : 0 .. N - 1) {
        rec[j] = (rec_member[j] != 0 -> REC_NEW : rec[j])
    }
    top = (G > newest_left -> G : newest_left);
    dissolve(top)
}

inline gather()
{
#ifdef NO_LEFT
    G++;
#else
    G = (newest_left > G -> newest_left : G) + 1;
#endif
    assert(G < EPOCHS);
    rev++;
    init_floor[G] = newest;
    init_members[G] = RANKS;
#ifndef LATE_WORD
    assert(!(lived & BIT(G))); /* no epoch that ever was is used again */
#endif
    for (j : 0 .. N - 1) {
        if
        :: HAS(RANKS, j) ->
            assert(state[j] == E_OUTSIDE || gen[j] != rec_gen[j] || epoch[j] < G); /* nor heard of */
            assert(rec_gen[j] > expelled[j]); /* who was given up is in no later epoch */
            init_gen[AT(G, j)] = rec_gen[j];
            init_address[AT(G, j)] = rec_address[j];
            rec[j] = REC_INITED;
            rec_ready[j] = 0;
            ACT(ACT_INIT, j);
            tell(j, INIT, G)
        :: else -> skip
        fi
    }
    phase = M_CONNECTING;
    j = 0
}

inline look_ready()
{
    if
    :: phase == M_CONNECTING && EVERY(RANKS, IS_READY_NOW) -> phase = M_SERVING
    :: else -> skip
    fi
}

/* A coordinator that was started again finds its group whole. */
inline adopt(g)
{
    G = g;
    phase = M_CONNECTING;
    rev++;
    for (j : 0 .. N - 1) {
        if
        :: HAS(RANKS, j) ->
            rec[j] = (rec_ready[j] == g -> REC_READY : REC_INITED);
            ACT(ACT_INIT, j);
            tell(j, INIT, g)
        :: else -> skip
        fi
    }
    j = 0;
    look_ready()
}

inline try_form()
{
    if
    :: phase == M_GATHERING && said != 0 && EVERY(RANKS, IS_HERE) ->
        e = 0;
        for (j : 0 .. N - 1) {
            e = (e == 0 && HAS(RANKS, j) -> rec_member[j] : e)
        }
        if
        :: EVERY(RANKS, NO_MEMBER) -> gather()
        :: else ->
            if
            :: G == 0 && EVERY(RANKS, SAME_GROUP) -> adopt(e)
            :: else -> dissolve_found()
            fi
        fi
    :: else -> skip
    fi
}

inline remember()
{
    RAISE(newest_left, a3);
    RAISE(newest_left, a4);
    RAISE(newest_left, a5);
    RAISE(newest, a6)
}

/* a1 generation, a2 address, a3 left, a4 member of, a5 heard, a7 revision. Before: it has never
 * heard of the epoch that broke, and can't leave it. */
#define ENTERED (IN_EPOCH(i) && a4 == G)
#define MOVED   (a4 != rec_member[i] && !ENTERED)
#ifdef NO_WAITS
#define WAITS 0
#else
#define WAITS (rec[i] == REC_NEW && a4 == 0 && a5 < G)
#endif
#define REPEATED (!MOVED && !WAITS && a1 == rec_gen[i] && a2 == rec_address[i])

inline say_again()
{
    if
    :: rec[i] == REC_NEW ->
        top = (G > newest_left -> G : newest_left);
        dissolve(top)
    :: IN_EPOCH(i) && !(rec[i] == REC_READY && a7 == rev) -> ACT(ACT_INIT, i); tell(i, INIT, G)
    :: else -> skip
    fi
}

inline take_hello()
{
    new_life = a1 > rec_gen[i];
    was_in = IN_EPOCH(i);
    expelled[i] = (new_life && rec_gen[i] != 0 -> rec_gen[i] : expelled[i]);
    if
    :: G > 0 && (was_in || a3 == G) -> break_epoch()
    :: else -> skip
    fi;
    rec_gen[i] = a1;
    rec_address[i] = a2;
    rec_member[i] = a4;
    rec_ready[i] = 0;
    rec[i] = REC_HELLO;
    remember();
    try_form()
}

#ifdef NO_EXPULSION
#define OVER 0
#else
#define OVER (a1 <= expelled[i] || a1 < rec_gen[i] || HAS(rec_removed, i))
#endif

inline on_hello()
{
    REC_BEFORE(1, i);
    if
    :: OVER ->
        ACT(ACT_REFUSE, i);
        if
        :: state[i] != E_OUTSIDE && gen[i] == a1 -> down[i] ! REFUSED, 0, 0
        :: else -> skip
        fi
    :: else ->
        if
        :: REPEATED -> remember(); say_again()
        :: else -> take_hello()
        fi
    fi;
    REC_AFTER;
    i = 0;
    j = 0
}

inline on_ready()
{
    REC_BEFORE(2, i);
    if
    :: a2 != rec_gen[i] || rec[i] == REC_NEW || (rec[i] == REC_HELLO && rec_member[i] == 0) -> skip
    :: else ->
        if
        :: a1 != (rec[i] == REC_HELLO -> rec_member[i] : G) -> skip
        :: else ->
            rec_ready[i] = a1;
            rec[i] = (rec[i] == REC_HELLO -> REC_HELLO : REC_READY);
            look_ready()
        fi
    fi;
    REC_AFTER;
    i = 0
}

/* A life that is over: silent for too long, or removed for good. */
inline expel()
{
    expelled[i] = rec_gen[i];
    was_in = IN_EPOCH(i);
    rec[i] = REC_NEW;
    if
    :: was_in -> break_epoch()
#ifndef NO_CLAIM_BREAK
    :: !was_in && rec_member[i] != 0 && phase == M_GATHERING -> dissolve_found()
#endif
    :: else -> skip
    fi
}

inline on_silent()
{
    REC_BEFORE(3, i);
    expel();
    REC_AFTER;
    i = 0;
    j = 0
}

inline on_removed()
{
    REC_BEFORE(4, i);
    rec_removed = rec_removed | BIT(i);
    told = told | BIT(i);
    expel();
    try_form();
    REC_AFTER;
    i = 0;
    j = 0
}

/* KEEPS: what is under way reaches, or comes from, the new life as well. */
inline start_again(keeps)
{
    restarts++;
    phase = M_GATHERING;
    G = 0;
    newest = 0;
    newest_left = 0;
    said = 0;
#ifndef NO_REMOVED_LIST
    rec_removed = removed; /* its launcher's list */
#else
    rec_removed = 0;
#endif
    told = removed;
    for (i : 0 .. N - 1) {
        rec[i] = REC_NEW;
        rec_gen[i] = 0;
        rec_address[i] = 0;
        rec_member[i] = 0;
        rec_ready[i] = 0;
        expelled[i] = 0;
        do
        :: !keeps && nempty(up[i]) -> up[i] ? a1, a1, a2, a3, a4, a5, a6, a7
        :: else -> break
        od;
        do
        :: !keeps && nempty(down[i]) -> down[i] ? a1, a2, a3
        :: else -> break
        od;
        if
        :: state[i] != E_OUTSIDE -> down[i] ! ROLLCALL, 0, 0
        :: else -> skip
        fi
    }
    i = 0
}

inline front_says()
{
    REC_BEFORE(5, 0);
    said = known + 1;
    RAISE(newest_left, known);
    RAISE(newest, PASSED_ON);
#ifndef NO_FRONT_BREAK
    if
    :: known > G -> break_epoch()
    :: else -> skip
    fi;
#endif
    try_form();
    REC_AFTER;
    i = 0;
    j = 0
}

#define FROM(r)                                                                                     \
    FRONT_ROWS(r)                                                                                   \
    :: d_step { EVERY(ALL, ROOM) && nempty(up[r]) && up[r] ? [HELLO, _, _, _, _, _, _, _] ->          \
        up[r] ? HELLO, a1, a2, a3, a4, a5, a6, a7; i = r; on_hello() }                              \
    :: d_step { nempty(up[r]) && up[r] ? [IS_READY, _, _, _, _, _, _, _] ->                         \
        up[r] ? IS_READY, a1, a2, a3, a4, a5, a6, a7; i = r; on_ready() }                           \
    :: d_step { EVERY(ALL, ROOM) && (stopped & BIT(r)) && rec_gen[r] == gen[r] && rec[r] != REC_NEW -> \
        i = r; on_silent() }                                                                        \
    :: d_step { EVERY(ALL, ROOM) && HAS(removed & ~told, r) -> i = r; on_removed() }           \
    :: d_step { losses < LOSSES && nempty(up[r]) -> losses++; up[r] ? a1, a1, a2, a3, a4, a5, a6, a7 } \
    :: d_step { losses < LOSSES && nempty(down[r]) -> losses++; down[r] ? a1, a2, a3 }

proctype coordinator()
{
end:
    do
    FROM(0)
    FROM(1)
#if N > 2
    FROM(2)
#endif
    /* a front end's HELLO, and what it says later */
    :: d_step { EVERY(ALL, ROOM) && (said != known + 1 || newest < PASSED_ON) -> front_says() }
#if UPDATES
    :: d_step { known_weights < newest -> known_weights = newest } /* STATS */
#endif
#if RESTARTS
    :: d_step { restarts < RESTARTS && EVERY(ALL, ROOM) && MAY_RESTART -> start_again(0) }
#ifdef KEEPS
    :: d_step { restarts < RESTARTS && EVERY(ALL, ROOM) && MAY_RESTART -> start_again(1) }
#endif
#endif
#if PAUSES
    :: d_step { phase == M_SERVING && !pause_called -> pause_called = 1 }
#endif
    od
}

init
{
    atomic {
        run coordinator();
        for (i : 0 .. N - 1) {
            run rank(i)
        }
        i = 0
    }
}
