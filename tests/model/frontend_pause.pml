/*
 * frontend_pause.pml: the design that this protocol replaces: the pause state is in the front end, which
 * holds back new requests; engines do what a message says when they read it. Two ranks, one
 * front end, one coordinator.
 *
 * The deadlock: a request makes the front end tell the coordinator (FIRST_REQ); then a pause goes to
 * both ranks, then a weight update. The coordinator's START_DP_WAVE comes to rank 0 before its update
 * and to rank 1 behind it: rank 0 is in a forward pass, rank 1 in the transfer, each waits for
 * the other.
 */
mtype = { ADD, PAUSE, UPDATE, START };

chan input[2] = [4] of { mtype };  /* what a rank reads, in order of arrival */
chan acked = [2] of { byte };      /* a rank has seen the pause */
chan updated = [2] of { byte };
chan first_request = [1] of { bit };

byte in_step, in_update; /* ranks in that collective */

inline together(count)
{
    count++;
    if
    :: count % 2 == 0 /* the last one lets both go on */
    :: count % 2 == 1 -> count % 2 == 0
    fi
}

proctype rank(byte me)
{
    bit running;
    byte steps; /* until the wave is over */

end:
    do
    :: input[me] ? ADD -> running = 1
    :: input[me] ? START -> running = 1
    :: input[me] ? PAUSE -> acked ! me
    :: input[me] ? UPDATE -> together(in_update); updated ! me
    :: running && empty(input[me]) ->
        together(in_step); /* with a request or without: a dummy step */
        steps++;
        if
        :: steps == 2 -> running = 0; steps = 0
        :: else -> skip
        fi
    od
}

proctype coordinator()
{
end:
    do
    :: first_request ? _ -> input[0] ! START; input[1] ! START
    od
}

proctype frontend()
{
    first_request ! 1;
    input[0] ! ADD;
    input[0] ! PAUSE;
    input[1] ! PAUSE;
    acked ? _;
    acked ? _;
    /* paused, as this front end believes */
    input[0] ! UPDATE;
    input[1] ! UPDATE;
    updated ? _;
    updated ? _
}

init
{
    atomic {
        run rank(0);
        run rank(1);
        run coordinator();
        run frontend()
    }
}
