/*
 * cancels.pml: a PAUSE(abort) whose CANCEL some rank held when it voted ends no request on any rank.
 * Votes carry the lowest number of a PAUSE that waits together with its CANCEL.
 */

/* Votes name the lowest one only: whether a later one is cancelled is known in the next round. */
#ifdef NO_SPARING
#define MAY_BE_SPARED 0
#else
#define MAY_BE_SPARED                                                                               \
    (op[c] == CMD_PAUSE + 8 * PAUSE_ABORT && slot[p].cancel[i] < done[i] + 1)
#endif

/* A CANCEL of f's command n is here, not applied. */
inline find_cancel(f, n)
{
    cancelled = 0;
    for (k : done[f] + 1 .. seen[f]) {
        cancelled = cancelled || op[CALL(heard[f], f, k)] == CMD_CANCEL + 8 * (n)
    }
}

inline vote_cancel()
{
    for (i : 0 .. F - 1) {
        for (j : done[i] + 1 .. seen[i]) {
            find_cancel(i, j);
            if
            :: cancelled && KIND(CALL(heard[i], i, j)) == CMD_PAUSE ->
                LOWER(slot[pos].cancel[i], j);
                slot[pos].spared = slot[pos].spared | (1 << CALL(heard[i], i, j))
            :: else -> skip
            fi
        }
    }
}

inline is_cancelled(call)
{
    find_cancel(i, done[i]);
#ifndef NO_CANCEL
    cancelled = cancelled || slot[p].cancel[i] == done[i]
#endif
}
