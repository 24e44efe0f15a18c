/*
 * delivery.pml: how a front end's commands reach every rank, and the answers come back, over
 * connections that lose messages (api_frontend/cmd_stream.h, engine_core/dp/command_stream.h,
 * engine_core/reply_log.h): numbers without gaps, SEEN, DONE, what is said again, and answers that are
 * repeated word for word. LOSSES messages are lost anywhere; the front end starts again LIVES - 1 times.
 * The command EXCL is one that nothing may follow before it is answered. group.pml assumes what is
 * checked here: that each rank has each command once, in order.
 */
#include "settings.pml"
#ifndef N
#define N 2
#endif
#ifndef C
#define C 2
#endif
#ifndef LOSSES
#define LOSSES 2
#endif
#ifndef LIVES
#define LIVES 1
#endif
#ifndef EXCL
#define EXCL 0
#endif

mtype = { SEEN, DONE };
chan commands[N] = [3] of { byte, byte };            /* life, number */
chan answers[N] = [4] of { mtype, byte, byte, byte }; /* life, number, outcome */

/* the front end; acknowledged, answered: per rank */
byte life = 1, sent, acknowledged[N];
byte answer[N * 4];

/* ranks: the life followed, the gap-free prefix, what of it is applied; had: a bit per command */
byte heard[N], seen[N], done[N], had[N];

byte outcome[(LIVES + 1) * 4]; /* of each command, agreed by the group */
byte losses;

hidden byte i, n, l, o;

#define AT(r, x)     ((r) * 4 + (x))
#define GOT(r, x)    (answer[AT(r, x)] != 0)
#define ALL_GOT(x)   (GOT(0, x) && (N == 1 || GOT(N - 1, x)))
#define EXCLUDED(x)  (EXCL != 0 && (x) > EXCL && !ALL_GOT(EXCL))
#define UNSEEN(r)    (acknowledged[r] < sent)
#define UNANSWERED(r, x) ((x) <= acknowledged[r] && (x) <= sent && !GOT(r, x))
#define ROOM(r)      (len(answers[r]) <= 2)
#define FOLLOWS(r)   (heard[r] == heard[me] && seen[r] > done[me])

proctype frontend()
{
end:
    do
    :: d_step { sent < C && !EXCLUDED(sent + 1) && nfull(commands[0]) && nfull(commands[N - 1]) ->
        sent++;
        for (i : 0 .. N - 1) {
            commands[i] ! life, sent
        }
        i = 0 }
#if LIVES > 1
    :: d_step { life < LIVES && sent > 0 ->
        life++;
        sent = 0;
        for (i : 0 .. N - 1) {
            acknowledged[i] = 0;
            for (n : 0 .. 3) {
                answer[AT(i, n)] = 0
            }
        }
        i = 0;
        n = 0 }
#endif
    od
}

/* The front end's side of one rank: what is not acknowledged, or not answered, is said again. */
proctype link(byte me)
{
end:
    do
    :: d_step { nempty(answers[me]) && answers[me] ? [SEEN, _, _, _] ->
        answers[me] ? SEEN, l, n, o;
        acknowledged[me] = (l == life && n > acknowledged[me] -> n : acknowledged[me]) }
    :: d_step { nempty(answers[me]) && answers[me] ? [DONE, _, _, _] ->
        answers[me] ? DONE, l, n, o;
        if
#ifndef NO_LIVES
        :: l != life -> skip
#endif
        :: else ->
            acknowledged[me] = (n > acknowledged[me] -> n : acknowledged[me]);
            assert(o == outcome[AT(life, n)]); /* of this command of this life */
            assert(answer[AT(me, n)] == 0 || answer[AT(me, n)] == o);
            answer[AT(me, n)] = o
        fi }
#ifndef NO_RESEND
    :: d_step { UNSEEN(me) && empty(commands[me]) -> commands[me] ! life, acknowledged[me] + 1 }
#endif
#ifndef NO_PROBE /* asked at any time; only then does it do something */
    :: d_step { UNANSWERED(me, 1) && empty(commands[me]) && empty(answers[me]) && done[me] >= 1 -> commands[me] ! life, 1 }
    :: d_step { UNANSWERED(me, 2) && empty(commands[me]) && empty(answers[me]) && done[me] >= 2 -> commands[me] ! life, 2 }
    :: d_step { UNANSWERED(me, 3) && empty(commands[me]) && empty(answers[me]) && done[me] >= 3 -> commands[me] ! life, 3 }
#endif
    :: d_step { losses < LOSSES && nempty(commands[me]) -> losses++; commands[me] ? l, n }
    :: d_step { losses < LOSSES && nempty(answers[me]) -> losses++; answers[me] ? _, l, n, o }
    od
}

inline say_done(x)
{
    answers[me] ! DONE, heard[me], x, outcome[AT(heard[me], x)]
}

#define BUSY (EXCL != 0 && seen[me] >= EXCL && done[me] < EXCL)

inline receive()
{
    commands[me] ? l, n;
    if
    :: l > heard[me] ->
        heard[me] = l;
        seen[me] = 0;
        done[me] = 0;
        had[me] = 0
    :: else -> skip
    fi;
    if
    :: l < heard[me] -> skip /* of a life that is over */
    :: else ->
        had[me] = had[me] | (1 << n);
        if
        :: n <= seen[me] -> /* again: and its answer again, if there is one */
            answers[me] ! SEEN, heard[me], seen[me], 0;
#ifdef NO_ONCE
            done[me] = (n <= done[me] -> n - 1 : done[me])
#else
#ifndef NO_REPLY_LOG
            if
            :: n <= done[me] -> say_done(n)
            :: else -> skip
            fi
#endif
#endif
#ifdef NO_GAPS
        :: n > seen[me] && !BUSY -> seen[me] = n; answers[me] ! SEEN, heard[me], n, 0
#else
        :: n == seen[me] + 1 && !BUSY -> seen[me] = n; answers[me] ! SEEN, heard[me], n, 0
#endif
        :: else -> answers[me] ! SEEN, heard[me], seen[me], 0 /* from where to send again */
        fi
    fi
}

byte applied[N * (LIVES + 1)]; /* ghost: the last command that a rank applied of a life */

proctype rank(byte me)
{
end:
    do
    :: d_step { nempty(commands[me]) && ROOM(me) -> receive() }
    /* a round: what all have, in order */
    :: d_step { heard[me] != 0 && FOLLOWS(0) && FOLLOWS(N - 1) && ROOM(me) ->
        done[me]++;
        assert(had[me] & (1 << done[me]));                                  /* I have it */
        assert(done[me] == applied[me * (LIVES + 1) + heard[me]] + 1);       /* once, in order */
        applied[me * (LIVES + 1) + heard[me]] = done[me];
        outcome[AT(heard[me], done[me])] = heard[me] + 2 * (done[me] & 1);
        say_done(done[me]) }
    :: timeout -> d_step {
        for (i : 1 .. sent) {
            assert(GOT(me, i)) /* every command is answered */
        }
        assert(sent == C);
        i = 0 }; break
    od
}

init
{
    atomic {
        run frontend();
        for (i : 0 .. N - 1) {
            run rank(i);
            run link(i)
        }
        i = 0
    }
}
