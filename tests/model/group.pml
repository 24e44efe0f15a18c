/*
 * group.pml: the group's protocol, N ranks and F front ends: rounds, waves, commands, and with UPDATES
 * the weight calls. README.md says what the parameters below mean and what is left out; the names
 * are those of engine_core/dp, whose numbers come in with constants.pml.
 *
 * A rank's collectives are entered one after the other: the k-th of all ranks must be the same, and is
 * left when all have entered it. Two slots suffice, told apart by the parity of k. NO_x takes the rule
 * x out; run.sh then expects an error.
 */
#include "constants.pml"
#include "settings.pml"
#include "parameters.pml"

/* ---- what is said and answered ---- */

byte life[F];       /* of each front end, from 1 */
byte sent[STREAMS]; /* commands that this life has sent to all ranks */
byte op[CALLS];     /* kind + 8 * (mode, number of the cancelled command, or verb) */
byte ans[CALLS];    /* ranks that answered + 16 * outcome */
byte dead;          /* front ends that died and stay dead; ranks may miss what they sent */

#define KIND(c) (op[c] & 7)
#define ARG(c)  (op[c] >> 3)

/* outcomes of an answer */
#define DONE_OK         1
#define DONE_SUPERSEDED 2
#define DONE_FAILED     3 /* refused, or failed somewhere */
#define DONE_ORDER      4 /* not in this state */

/* ---- collectives ---- */

#define ROUND  1
#define STEP   2
#define UPDATE 3

typedef slot_t {
    byte kind, entered, left;
    bit idle, quiet;
    int tag;
    byte gen[F], top[F]; /* MIN of gen and, for its complement, MAX */
    byte seen[F];
#ifdef UPDATES
    byte ok[F];
    bit expired, clean, broken; /* broken: a rank has not come to this transfer */
    byte content, most;
#endif
#ifdef CANCELS
    byte cancel[F];
    mask_t spared; /* ghost: calls whose CANCEL some rank held when it voted */
#endif
}
slot_t slot[2];

byte stepping; /* ghost: ranks that are in a step */

#ifdef UPDATES
byte faults; /* things that went wrong so far, at most FAULTS */
bit trainer_dead;
byte open_update[F];            /* 1 + the last UPDATE that a front end has called */
byte in_beside, beside_failed; /* ranks that carry something out beside the steps; whose part failed */
#endif

/* scratch, within one d_step only */
hidden byte i, j, k, c, p, owed_f, verb;
hidden byte was_run, owed, beside, any_update, cancelled, held;
hidden int tag;
#ifdef RECORD
#include "record.pml"
#else
#define ACT(act, call, outcome) skip
#endif

inline enter(what)
{
    assert(slot[pos].kind == 0 || slot[pos].kind == what); /* the same sequence everywhere */
    slot[pos].kind = what;
    slot[pos].entered++;
    assert(slot[pos].entered <= N)
}

inline clear_slot()
{
    slot[pos].kind = 0;
    slot[pos].entered = 0;
    slot[pos].left = 0;
    slot[pos].idle = 0;
    slot[pos].quiet = 0;
    slot[pos].tag = 0;
    for (i : 0 .. F - 1) {
        slot[pos].gen[i] = 0;
        slot[pos].top[i] = 0;
        slot[pos].seen[i] = 0;
#ifdef UPDATES
        slot[pos].ok[i] = 0;
#endif
#ifdef CANCELS
        slot[pos].cancel[i] = 0;
#endif
    }
#ifdef UPDATES
    slot[pos].expired = 0;
    slot[pos].clean = 0;
    slot[pos].broken = 0;
    slot[pos].content = 0;
    slot[pos].most = 0;
#endif
#ifdef CANCELS
    slot[pos].spared = 0
#endif
}

inline leave()
{
    slot[pos].left++;
    if
    :: slot[pos].left == N -> clear_slot()
    :: else -> skip
    fi;
    pos = 1 - pos
}

inline answer(call, outcome)
{
    ACT(ACT_DONE, call, outcome);
    if
#ifdef NO_R15
    :: ans[call] & (1 << me) -> skip
#endif
    :: else ->
        assert(!(ans[call] & (1 << me)));                     /* once */
        assert(ans[call] < 16 || (ans[call] >> 4) == outcome); /* everywhere the same */
        ans[call] = (ans[call] & 15) | (1 << me) | (outcome << 4);
        if
        :: KIND(call) == CMD_PAUSE && outcome == DONE_OK ->
            assert(stepping == 0); /* what "paused" says */
            held_calls = held_calls | (1 << call)
        :: else -> skip
        fi
    fi
}

inline answer_calls(outcome)
{
    for (k : 0 .. CALLS - 1) {
        if
        :: calls & (1 << k) -> answer(k, outcome)
        :: else -> skip
        fi
    }
    calls = 0
}

#ifdef CANCELS
#include "cancels.pml"
#endif

/* ---- pause state: the code's table ---- */

inline pause_take(event)
{
    tag = PAUSE_EFFECTS(pause, event);
    assert(!(tag & PAUSE_IMPOSSIBLE));
    pause = PAUSE_NEXT(pause, event);
    if
    :: pause == PS_RUNNING -> sole = 0
    :: else -> skip
    fi
}

inline apply_pause(call)
{
    sole = (pause == PS_RUNNING -> call + 1 : 0);
    pause_take((ARG(call) == PAUSE_ABORT -> EV_ABORT : (ARG(call) == PAUSE_KEEP -> EV_KEEP : EV_WAIT)));
    calls = calls | (1 << call);
    if
    :: tag & PAUSE_FINISH_ALL ->
        cancelled = 0;
#ifdef CANCELS
        is_cancelled(call);
#endif
        if
        :: !cancelled ->
            ACT(ACT_FINISH_ALL, 0, 0);
#ifdef CANCELS
            assert(!(slot[p].spared & (1 << call)));
#endif
            wait = 0;
            rem = 0
        :: else -> skip
        fi
    :: else -> skip
    fi;
#ifdef NO_R16
    if
    :: pause == PS_STOPPED -> answer_calls(DONE_OK)
    :: else -> skip
    fi
#endif
}

inline lift()
{
    if
    :: tag & PAUSE_LIFT -> answer_calls(DONE_SUPERSEDED)
    :: else -> skip
    fi
}

inline apply_resume(call)
{
    pause_take(EV_RESUME);
    lift();
    held_calls = 0;
    LOCAL_LIFT;
    answer(call, DONE_OK)
}

inline apply_cancel(call, target)
{
#ifdef NO_R18
    held = pause != PS_RUNNING;
#else
    held = pause != PS_RUNNING && sole == target + 1;
#endif
    pause_take((held -> EV_CANCEL_SOLE : EV_CANCEL_OTHER));
    lift();
    held_calls = held_calls & ~(1 << target);
    answer(call, DONE_OK)
}

#ifdef UPDATES
#include "update.pml"
#endif
inline apply_command()
{
    if
    :: KIND(c) == CMD_PAUSE -> apply_pause(c)
    :: KIND(c) == CMD_RESUME -> apply_resume(c)
    :: KIND(c) == CMD_CANCEL -> apply_cancel(c, c - (done[i] - ARG(c)))
#ifdef UPDATES
    :: KIND(c) == CMD_UPDATE -> apply_update()
#endif
    fi
}

/* The commands of front end i up to the MIN, in order; stops where an UPDATE is entered. */
inline apply_stream()
{
    j = MIN_SEEN(i);
    if
    :: AGREED(i) && done_life[i] != slot[p].gen[i] ->
        done_life[i] = slot[p].gen[i];
        done[i] = 0
    :: else -> skip
    fi;
    do
    :: AGREED(i) && done[i] < j && CAN_APPLY ->
        c = CALL(done_life[i], i, done[i] + 1);
        if
        :: HOLDS_UPDATES && KIND(c) == CMD_UPDATE -> break
#ifdef CANCELS
        :: MAY_BE_SPARED -> more = 1; break
#endif
        :: else ->
            assert(voted_life[i] == done_life[i] && voted[i] > done[i]); /* I have it */
            any_update = any_update || KIND(c) == CMD_UPDATE;
            done[i]++;
            apply_command()
        fi
    :: else -> break
    od
}

inline apply_commands()
{
#ifdef NO_R5
    for (i : me .. F - 1) {
        apply_stream()
    }
    for (i : 0 .. me - 1) {
        apply_stream()
    }
#else
    for (i : 0 .. F - 1) {
        apply_stream()
    }
#endif
    for (i : 0 .. F - 1) {
        more = more || (phase != UPDATE_BESIDE && AGREED(i) && done[i] < MIN_SEEN(i))
    }
}

#ifdef STARTS
#include "starts.pml"
#endif

/* Equal on all ranks iff their replicated states are (as far as 32 bits tell). */
inline make_tag()
{
    tag = runs + 2 * pause + 8 * more + 16 * sole;
    tag = 31 * tag + calls;
    for (i : 0 .. F - 1) {
        tag = 31 * tag + 4 * done[i] + done_life[i]
    }
#ifdef UPDATES
    tag = 31 * tag + phase + 4 * committing + 8 * update_call;
    tag = 31 * tag + gates + 8 * configured + 16 * weights + 256 * session
#endif
}

inline post()
{
    enter(ROUND);
    posted_idle = phase != UPDATE_OWED && !more && !(LOCKSTEP && runs);
    make_tag();
    if
    :: slot[pos].entered == 1 ->
        slot[pos].idle = 1;
        slot[pos].quiet = 1;
        slot[pos].tag = tag;
#ifdef UPDATES
        slot[pos].expired = 1;
        slot[pos].clean = 1;
#endif
        for (i : 0 .. F - 1) {
            slot[pos].gen[i] = 255;
            slot[pos].seen[i] = 255;
#ifdef UPDATES
            slot[pos].ok[i] = 255;
#endif
#ifdef CANCELS
            slot[pos].cancel[i] = 255;
#endif
        }
    :: else -> skip
    fi;
    assert(slot[pos].tag == tag); /* equal states; else the group is broken */
    slot[pos].idle = slot[pos].idle && !WORK;
    slot[pos].quiet = slot[pos].quiet && rem == 0;
    for (i : 0 .. F - 1) {
        voted_life[i] = heard[i];
        voted[i] = seen[i];
        LOWER(slot[pos].gen[i], heard[i]);
        RAISE(slot[pos].top[i], heard[i]);
#ifdef NO_R21
        /* generation and number as one number: of a newer life everything older is seen */
        if
        :: slot[pos].gen[i] < heard[i] -> skip
        :: else -> LOWER(slot[pos].seen[i], seen[i])
        fi
#else
        LOWER(slot[pos].seen[i], seen[i])
#endif
    }
#ifdef UPDATES
    vote_update();
#endif
#ifdef CANCELS
    vote_cancel();
#endif
    opened = !JOINS;
    voted_quiet = rem == 0;
    news_add = 0;
    posted = 1
}

inline decide()
{
    p = pos;
    was_run = runs;
    any_update = 0;
    owed_f = F;
    more = 0;
    REC_BEFORE;
#ifdef UPDATES
    decide_owed();
#endif
    apply_commands();
#ifdef UPDATES
    decide_expired();
#endif
#ifdef NO_R17
    if
    :: pause == PS_DRAINING && rem == 0 -> pause_take(EV_QUIET)
#else
    if
    :: pause == PS_DRAINING && slot[p].quiet -> pause_take(EV_QUIET)
#endif
    :: else -> skip
    fi;
    if
    :: pause == PS_STOPPED -> answer_calls(DONE_OK)
    :: else -> skip
    fi;
#ifdef UPDATES
#ifdef NO_GATE
#define OPEN 1
#else
#define OPEN (gates == 0)
#endif
    runs = OPEN && (pause == PS_RUNNING -> (!LOCKSTEP || !slot[p].idle) : pause == PS_DRAINING);
#else
    runs = (pause == PS_RUNNING -> (!LOCKSTEP || !slot[p].idle) : pause == PS_DRAINING);
#endif
    sc = 0;
    posted = 0;
    REC_AFTER;
    leave();
#ifdef NO_R3
    pos = (skipped -> 1 - pos : pos);
    skipped = 0;
#endif
#ifdef STARTS
    next_round();
#endif
#ifdef UPDATES
    go_on();
#endif
    i = 0;
    j = 0;
    k = 0
}

inline enter_step()
{
    assert(held_calls == 0); /* no step between an answered pause and its end */
#ifdef UPDATES
    assert(gates == 0 && !touched); /* nothing that was not committed */
#endif
    if
    :: LOCKSTEP -> enter(STEP)
    :: else -> skip
    fi;
#ifdef UPDATES
    if
    :: LOCKSTEP && slot[pos].entered == 1 -> slot[pos].content = content
    :: else -> skip
    fi;
    assert(!LOCKSTEP || slot[pos].content == content); /* no mixed weights */
#endif
    stepping = stepping | (1 << me);
    in_step = 1;
    if
    :: pause == PS_RUNNING && rem == 0 && wait > 0 && !LOCAL_FREEZE ->
        wait--;
        rem = LENGTH
    :: else -> skip
    fi
}

inline leave_step()
{
    stepping = stepping & ~(1 << me);
    in_step = 0;
    sc = (LOCKSTEP -> sc + 1 : 0);
    if
    :: LOCKSTEP -> leave()
    :: else -> skip
    fi
}

inline receive(f)
{
    heard[f] = (heard[f] == 0 -> 1 : heard[f]);
    seen[f]++;
    c = CALL(heard[f], f, seen[f]);
    if
    :: KIND(c) == CMD_PAUSE ->
#ifdef NO_R15
        if
        :: pause == PS_STOPPED -> answer(c, DONE_OK)
        :: else -> skip
        fi;
#endif
        LOCAL_STOP
#ifdef UPDATES
    :: KIND(c) == CMD_UPDATE -> receive_update(f)
#endif
    :: else -> skip
    fi;
    c = 0;
    k = 0
}

/* A newer life of the front end: nothing more of the old one. */
inline follow(f)
{
    heard[f] = life[f];
    seen[f] = 0
}

#ifndef NO_R3
#define SKIP_ROW
#else
#define SKIP_ROW :: d_step { CAN_SKIP -> skip_ahead() }
#define CAN_SKIP                                                                                    \
    (posted && !posted_idle && runs && !skipped && !in_step && slot[pos].entered < N                \
     && (slot[1 - pos].kind == 0 || (slot[1 - pos].kind == STEP && slot[1 - pos].left == 0)))
/* Steps on while the vote is out. */
inline skip_ahead()
{
    pos = 1 - pos;
    enter_step();
    skipped = 1
}
#endif

/* Nothing goes on any more: every call that all ranks have is answered, and no request is left that
 * may run. */
inline check_rest()
{
    assert(!posted && !in_step && phase == UPDATE_NONE && !more);
    assert(pause != PS_DRAINING);
    assert(calls == 0);
#ifdef UPDATES
    assert(!WORK || pause != PS_RUNNING || gates != 0);
    assert(!session);
#ifdef WITNESS
    assert(!(WITNESS)); /* expected to fail: such an end is reached */
#endif
#else
    assert(!WORK || pause != PS_RUNNING);
#endif
    for (i : 0 .. F - 1) {
        if
        :: dead & (1 << i) -> skip
        :: else ->
            assert(heard[i] == life[i] || sent[STREAM(life[i], i)] == 0);
            assert(seen[i] == sent[STREAM(life[i], i)]);
            for (j : 1 .. sent[STREAM(life[i], i)]) {
                assert((ans[CALL(life[i], i, j)] & 15) == ALL)
            }
        fi
    }
}

#ifdef RECORD
#include "guards.pml"
#endif

proctype rank(byte me)
{
    /* replicated */
    bit runs = !LOCKSTEP;
    bit more;
    byte pause, sole;
    mask_t calls;
    byte done[F], done_life[F];
    byte phase;
    /* local */
    bit pos, posted, posted_idle, opened, in_step, voted_quiet, news_add;
    byte seen[F], heard[F], voted[F], voted_life[F], missed;
    byte sc, wait, rem, adds;
#ifdef STARTS
    byte hinted;
#endif
    mask_t held_calls; /* ghost: calls that I answered with "paused" and that were not lifted since */
    LOCAL_DECL
#ifdef UPDATES
    bit session, committing, configured = CONFIGURED, expired, voted_expired, ended, voted_ended;
    bit in_update, touched;
    byte gates, update_call, weights, content, incoming, result, outstanding[F], verdict;
    byte refused; /* ghost: the call that my verdict is about */
    byte inits, of_init; /* ghosts: INITs that succeeded, and the one that the open session's START saw */
#endif

end:
    do
#ifdef RECORD
    NEXT_ROW
#endif
    :: d_step { CAN_RECEIVE(0) -> receive(0) }
#if F > 1
    :: d_step { CAN_RECEIVE(1) -> receive(1) }
#endif
#if LIVES > 1
    :: d_step { heard[0] < life[0] && life[0] > 1 -> follow(0) }
#endif
#ifdef DEATHS
    :: d_step { (dead & 1) && CAN_RECEIVE(0) -> missed = missed | 1 }
#endif
    :: d_step { adds < ADDS(me) -> adds++; wait = wait + !DIRTY; ON_ADD }
#ifdef ABORTS
    :: d_step { rem > 0 && !in_step && LATE_ABORT -> rem = 0 }
#endif
    :: d_step { NEXT_IS_VOTE -> post() }
    :: d_step { posted && !in_step && slot[pos].entered == N -> decide() }
    :: d_step { NEXT_IS_STEP -> enter_step() }
    :: d_step { in_step && STEP_COMPLETE && !LOCAL_FREEZE && rem > 1 -> rem = 0; leave_step() }
    :: d_step { in_step && STEP_COMPLETE -> rem = (rem > 0 && !LOCAL_FREEZE -> rem - 1 : rem); leave_step() }
    SKIP_ROW
#ifdef UPDATES
    UPDATE_ROWS
#endif
#ifdef STARTS
    START_ROWS
#endif
    :: timeout -> d_step { check_rest(); i = 0 }; break
    od
}

#include "frontend.pml"

#ifdef TRAINER_DIES
proctype trainer()
{
end:
    trainer_dead = 1
}
#endif

init
{
    d_step {
        for (i : 0 .. F - 1) {
            life[i] = 1
        }
        i = 0
    }
    atomic {
        for (i : 0 .. N - 1) {
            run rank(i)
        }
        for (i : 0 .. F - 1) {
            run frontend(i)
        }
#ifdef TRAINER_DIES
        run trainer();
#endif
        i = 0
    }
}
