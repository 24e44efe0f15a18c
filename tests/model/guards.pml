/* guards.pml: with RECORD_NEXT, what a rank is to do next becomes a row in each different state. */
#ifdef RECORD_NEXT
hidden byte rec_next, rec_joins, rec_expired;

inline record_next()
{
    rec_next = (NEXT_IS_VOTE -> 1 : (NEXT_IS_STEP -> 2 : 0));
    rec_joins = JOINS;
    rec_expired = EXPIRED;
    c_code {
        record_begin(); record(0); record(N); record(F); record(LOCKSTEP); record(SHADOW); record(K);
        record(Prank->runs); record(Prank->more); record(Prank->sc); record(Prank->pause);
        record(Prank->phase); record(Prank->ended); record(Prank->voted_ended);
        record(Prank->gates); record(Prank->session); record(Prank->posted);
        record(Prank->wait); record(Prank->rem); record(Prank->voted_quiet);
        record(rec_expired); record(Prank->voted_expired); record(rec_joins);
        for (int f = 0; f < F; f++) {
            record(Prank->heard[f]); record(Prank->voted_life[f]);
            record(Prank->seen[f]); record(Prank->voted[f]);
        }
        record(rec_next);
        record_end();
    }
}
/* Changes nothing: it makes the search look in each state. Within a collective nothing is next. */
#define NEXT_ROW :: d_step { !in_step && !in_update -> record_next() }
#else
#define NEXT_ROW
#endif
