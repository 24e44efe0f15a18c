/*
 * starts.pml: a group without a doorbell. Whoever has a vote out on an idle group announces its round,
 * again and again, and the coordinator invites all ranks to it with START, which may be lost (LOSSES
 * times), late or doubled; HINTS: a FIRST_REQ makes the coordinator invite a rank to the round it
 * believes to be next. A START of an old round has no effect and is not kept, except where R14 is
 * taken out.
 */
#define CURRENT 1
#define NEXT    2
#define STALE   4

byte start[N];   /* under way to a rank: START of its round, of the next one (an old one) */
byte invited[N]; /* the same, received */
byte rnd[N];     /* mod 4 */
byte losses;

#ifdef NO_R14
#define OLD(bits) (((bits) & (CURRENT | STALE)) -> STALE : 0)
#define INVITES   (start[me] != 0 && !posted)
#else
#define OLD(bits) 0
#define INVITES   (start[me] != 0)
#endif

#ifdef NO_R22
#define ANNOUNCES (posted && posted_idle && opened)
#else
#define ANNOUNCES (posted && posted_idle)
#endif

/* this rank's START reaches q as one of ... */
#define AS_SEEN_BY(q)                                                                               \
    (rnd[q] == rnd[me] -> CURRENT : (rnd[q] == ((rnd[me] + 3) & 3) -> NEXT : STALE))
#ifdef NO_R14
#define UNINVITED(q) (AS_SEEN_BY(q) != STALE && !(start[q] & AS_SEEN_BY(q)))
#else
#define UNINVITED(q) (AS_SEEN_BY(q) != STALE && !((start[q] | invited[q]) & AS_SEEN_BY(q)))
#endif
#if N == 2
#define SOME_UNINVITED (UNINVITED(0) || UNINVITED(1))
#else
#define SOME_UNINVITED (UNINVITED(0) || UNINVITED(1) || UNINVITED(2))
#endif

inline announce()
{
    for (i : 0 .. N - 1) {
        if
        :: UNINVITED(i) -> start[i] = start[i] | AS_SEEN_BY(i)
        :: else -> skip
        fi
    }
    i = 0
}

inline be_invited()
{
#ifdef NO_R14
    invited[me] = invited[me] | CURRENT;
#else
    invited[me] = invited[me] | start[me];
#endif
    start[me] = 0
}

inline next_round()
{
    rnd[me] = (rnd[me] + 1) & 3;
    start[me] = OLD(start[me]) | ((start[me] & NEXT) -> CURRENT : 0);
    invited[me] = ((invited[me] & NEXT) -> CURRENT : 0)
}

/* FIRST_REQ: the coordinator's round is that of rank 0, which may be old or one ahead. */
#define HINT (rnd[me] == rnd[0] -> CURRENT : (rnd[me] == ((rnd[0] + 3) & 3) -> NEXT : 0))

#define START_ROWS                                                                                  \
    :: d_step { ANNOUNCES && SOME_UNINVITED -> announce() }                                         \
    :: d_step { INVITES -> be_invited() }                                                           \
    :: d_step { start[me] != 0 && losses < LOSSES -> start[me] = 0; losses++ }                      \
    :: d_step { hinted < HINTS && HINT -> hinted++; start[me] = start[me] | HINT }
