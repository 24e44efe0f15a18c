/*
 * update.pml: the weight calls, in place or, with SHADOW, into a second set. An UPDATE in place is a
 * collective in which all ranks must be; INIT, and with SHADOW an UPDATE and the second half of a
 * FINISH, go on beside the steps. The trainer may die (TRAINER_DIES) and FAULTS things may go wrong on
 * single ranks: a call is refused or cancelled, a transfer or a commit fails, other weights come.
 */
#define BESIDE_VERB(v)  ((v) == VERB_INIT || (SHADOW && ((v) == VERB_UPDATE || (v) == VERB_FINISH)))
#define FRONTEND_OF(x)  (((x) / C) % F)
#define OWED_F          FRONTEND_OF(update_call - 1)
#define OWED_VERB       ARG(update_call - 1)
#define FAULT_LEFT      (faults < FAULTS)
#define NEW_WEIGHTS     (weights + 1)
#define OTHER_WEIGHTS   99
#define EXPIRED         (session && phase == UPDATE_NONE && expired)
#define ADMITS(v)                                                                                   \
    ((((v) == VERB_START -> ADMIT_2 : ((v) == VERB_UPDATE -> ADMIT_3 :                              \
       ((v) == VERB_FINISH -> ADMIT_4 : 255))) >> (4 * (gates >= GATE_DIRTY) + 2 * session + configured)) & 1)

/* what has been received and not been answered keeps its stream closed, or closed to UPDATEs */
#define UPDATE_EXCLUDES(f)                                                                          \
    (outstanding[f] != 0                                                                            \
     && (KIND(CALL((heard[f] == 0 -> 1 : heard[f]), f, seen[f] + 1)) == CMD_UPDATE                  \
         || !BESIDE_VERB(ARG(outstanding[f] - 1))))

inline receive_update(f)
{
    outstanding[f] = c + 1
}

inline answer_update(call, outcome)
{
    outstanding[FRONTEND_OF(call)] = 0;
    verdict = verdict & ~(1 << FRONTEND_OF(call));
    expired = 0;
    answer(call, outcome)
}

/* ---- state of the weights ---- */

inline mark_dirty()
{
    if
    :: !SHADOW && !(gates & GATE_DIRTY) ->
        gates = gates | GATE_DIRTY;
        ACT(ACT_DIRTY, 0, 0);
        wait = 0;
        rem = 0
    :: else -> skip
    fi
}

inline close_session(is_clean)
{
    if
    :: session ->
        session = 0;
        gates = gates & ~GATE_SESSION;
        ACT(ACT_SESSION_CLOSE, 0, 0);
        incoming = 0;
        expired = 0;
        if
        :: is_clean -> skip
        :: else -> mark_dirty()
        fi
    :: else -> skip
    fi
}

inline end_update()
{
    phase = UPDATE_NONE;
    update_call = 0;
    committing = 0;
    ended = 0;
    voted_ended = 0;
    result = 0;
    in_beside = in_beside & ~(1 << me);
    beside_failed = beside_failed & ~(1 << me)
}

/* A failed commit, transfer or completion: the session is over. */
inline fail_session(is_clean)
{
    session = 0;
    gates = gates & ~GATE_SESSION;
    incoming = 0;
    ACT(ACT_UPDATE_OUTCOME, verb, 0);
    if
    :: is_clean -> skip
    :: else -> mark_dirty()
    fi
}

/* ---- outcomes ---- */

inline decide_commit()
{
    if
#ifdef NO_CONTENT
    :: held ->
#else
    :: held && slot[p].content == slot[p].most ->
#endif
        session = 0;
        gates = gates & ~(GATE_SESSION | GATE_DIRTY);
        weights++;
        ACT(ACT_PUBLISH, 0, 0);
        if
        :: SHADOW -> content = incoming; incoming = 0
        :: else -> skip
        fi;
        c = update_call - 1;
        answer_update(c, DONE_OK)
    :: else ->
        fail_session(0);
        c = update_call - 1;
        answer_update(c, DONE_FAILED)
    fi;
    end_update()
}

inline decide_plain_outcome()
{
    if
    :: verb == VERB_INIT -> configured = held; inits = inits + held; ACT(ACT_UPDATE_OUTCOME, verb, held)
    :: verb == VERB_START ->
        session = session || held;
        of_init = (held -> inits : of_init);
#ifdef NO_SESSION_GATE
        gates = gates;
#else
        gates = gates | (held && !SHADOW -> GATE_SESSION : 0);
#endif
        ACT(ACT_UPDATE_OUTCOME, verb, held)
    :: verb == VERB_UPDATE && held -> ACT(ACT_UPDATE_OUTCOME, verb, 1)
    :: verb == VERB_UPDATE && !held ->
        configured = 0;
        fail_session(slot[p].clean)
    fi;
    expired = 0;
    c = update_call - 1;
    answer_update(c, (held -> DONE_OK : DONE_FAILED));
    end_update()
}

inline decide_owed()
{
    beside = phase == UPDATE_BESIDE;
    owed = phase == UPDATE_OWED;
    owed_f = (owed || beside -> OWED_F : F);
    owed = owed || (beside && slot[p].ok[owed_f] != VOTE_PENDING);
    if
    :: owed ->
        verb = OWED_VERB;
#ifdef NO_R8
        held = result == VOTE_OK;
#else
        held = slot[p].ok[owed_f] == VOTE_OK;
#endif
        if
        :: verb != VERB_FINISH -> decide_plain_outcome()
        :: verb == VERB_FINISH && committing -> decide_commit()
        :: verb == VERB_FINISH && !committing && held ->
            committing = 1;
            phase = (SHADOW -> UPDATE_BESIDE : UPDATE_CARRYING);
            result = 0;
            ACT(ACT_UPDATE_COMMIT, 0, 0)
        :: else ->
            c = update_call - 1;
            answer_update(c, DONE_FAILED);
            end_update()
        fi
    :: else -> skip
    fi
}

inline decide_expired()
{
    if
    :: owed || any_update -> voted_expired = 0
    :: else ->
        if
#ifdef NO_EXPIRED
        :: EXPIRED -> close_session(slot[p].clean)
#else
        :: slot[p].expired -> close_session(slot[p].clean)
#endif
        :: else -> skip
        fi
    fi
}

/* ---- commands ---- */

inline enter_update()
{
    phase = (verb != VERB_FINISH && BESIDE_VERB(verb) -> UPDATE_BESIDE : UPDATE_CARRYING);
    update_call = c + 1;
    committing = 0;
    ended = 0;
    voted_ended = 0;
    result = 0;
    if
    :: verdict & (1 << i) -> /* cancelled here since the vote: the outcome will tell the others */
        result = VOTE_FAILED;
        if
        :: phase == UPDATE_BESIDE -> ended = 1; beside_failed = beside_failed | (1 << me)
        :: else -> phase = UPDATE_OWED
        fi
    :: else ->
        assert(refused != c + 1); /* nobody carries out what it refused */
        assert(verb != VERB_UPDATE || of_init == inits); /* what feeds it is what its START saw */
        ACT(ACT_UPDATE_ENTER, verb, 0);
        in_beside = in_beside | (phase == UPDATE_BESIDE -> 1 << me : 0)
    fi
}

inline apply_update()
{
    verb = ARG(c);
    if
    :: !ADMITS(verb) -> answer_update(c, DONE_ORDER)
#ifdef NO_R7
    :: ADMITS(verb) && (verdict & (1 << i)) -> answer_update(c, DONE_FAILED)
    :: ADMITS(verb) && !(verdict & (1 << i)) ->
#else
    :: ADMITS(verb) && slot[p].ok[i] != VOTE_OK -> answer_update(c, DONE_FAILED)
    :: ADMITS(verb) && slot[p].ok[i] == VOTE_OK ->
#endif
        if
        :: verb == VERB_SET_VERSION -> ACT(ACT_RELABEL, 0, 0); answer_update(c, DONE_OK)
        :: verb == VERB_ABORT -> close_session(slot[p].clean); answer_update(c, DONE_OK)
#ifndef NO_INIT_CLOSES
        :: verb == VERB_INIT -> close_session(slot[p].clean); enter_update()
#endif
        :: else -> enter_update()
        fi
    fi
}

/* ---- votes ---- */

inline vote_update()
{
    for (i : 0 .. F - 1) {
        if
        :: phase == UPDATE_BESIDE && !ended && i == OWED_F -> slot[pos].ok[i] = VOTE_PENDING
        :: (phase == UPDATE_OWED || (phase == UPDATE_BESIDE && ended)) && i == OWED_F ->
            LOWER(slot[pos].ok[i], result)
        :: else ->
            LOWER(slot[pos].ok[i], ((verdict & (1 << i)) -> VOTE_FAILED : VOTE_OK))
        fi
    }
    slot[pos].expired = slot[pos].expired && EXPIRED;
    slot[pos].clean = slot[pos].clean && !touched;
    k = (committing && (phase == UPDATE_OWED || ended) -> (SHADOW -> incoming : content) : 0);
    if
    :: slot[pos].entered == 1 -> slot[pos].content = k; slot[pos].most = k
    :: else -> LOWER(slot[pos].content, k); RAISE(slot[pos].most, k)
    fi;
    k = 0;
    voted_expired = EXPIRED;
    voted_ended = ended
}

/* ---- what a rank does meanwhile ---- */

/* After the round: a transfer in place is the next collective, also of a rank that was cancelled. */
inline go_on()
{
    if
    :: (phase == UPDATE_CARRYING || phase == UPDATE_OWED) && OWED_VERB == VERB_UPDATE ->
        enter(UPDATE);
        in_update = 1;
        slot[pos].broken = slot[pos].broken || phase == UPDATE_OWED
    :: else -> skip
    fi
}

#define ENDS_LOCALLY   (phase == UPDATE_CARRYING && !in_update)
/* A rank whose part failed could go on before its peers come: the same, as it would only vote. */
#define IN_TRANSFER    (in_update && phase == UPDATE_CARRYING && slot[pos].entered == N)
#define TRANSFER_ENDS  (IN_TRANSFER && !slot[pos].broken)
#define TRANSFER_FAILS (IN_TRANSFER && (trainer_dead || slot[pos].broken))
#define NOT_ENTERED    (in_update && phase == UPDATE_OWED && slot[pos].entered == N)
#define AT_WORK        (phase == UPDATE_BESIDE && !ended)
#define BESIDE_ENDS    (AT_WORK && (committing || (in_beside == ALL && beside_failed == 0)))
#define BESIDE_FAILS   (AT_WORK && !committing && (trainer_dead || beside_failed != 0))

inline end_locally(outcome)
{
    result = outcome;
    phase = UPDATE_OWED;
    if
    :: committing && outcome == VOTE_OK -> content = NEW_WEIGHTS; touched = 0
    :: else -> skip
    fi
}

inline end_transfer(outcome, touches)
{
    result = outcome;
    phase = UPDATE_OWED;
    in_update = 0;
    touched = touched || touches;
    slot[pos].broken = slot[pos].broken || outcome != VOTE_OK;
    leave();
    i = 0
}

inline end_beside(outcome)
{
    result = outcome;
    ended = 1;
    if
    :: outcome != VOTE_OK -> beside_failed = beside_failed | (1 << me)
    :: outcome == VOTE_OK && SHADOW && OWED_VERB == VERB_UPDATE -> incoming = NEW_WEIGHTS
    :: else -> skip
    fi
#ifdef NO_FLIP
    ;
    if
    :: committing && outcome == VOTE_OK -> content = incoming /* flips when it is ready itself */
    :: else -> skip
    fi
#endif
}

#ifdef NO_R6
/* A paused rank with no vote out obeys an UPDATE as soon as it reads it. */
#define OBEYS(f)                                                                                    \
    (pause == PS_STOPPED && AWAKE && phase == UPDATE_NONE && outstanding[f] != 0                    \
     && ARG(outstanding[f] - 1) == VERB_UPDATE)
#define OBEY_ROW                                                                                    \
    :: d_step { OBEYS(0) -> update_call = outstanding[0]; phase = UPDATE_CARRYING; go_on() }
#else
#define OBEY_ROW
#endif

#define UPDATE_ROWS                                                                                 \
    OBEY_ROW                                                                                        \
    :: d_step { ENDS_LOCALLY -> end_locally(VOTE_OK) }                                              \
    :: d_step { ENDS_LOCALLY && FAULT_LEFT -> faults++; end_locally(VOTE_FAILED) }                  \
    :: d_step { ENDS_LOCALLY && committing && FAULT_LEFT ->                                         \
        faults++; end_locally(VOTE_OK); content = OTHER_WEIGHTS }                                   \
    :: d_step { TRANSFER_ENDS -> end_transfer(VOTE_OK, 1) }                                         \
    :: d_step { TRANSFER_FAILS -> end_transfer(VOTE_FAILED, 1) }                                    \
    :: d_step { TRANSFER_FAILS -> end_transfer(VOTE_FAILED, 0) }                                    \
    :: d_step { IN_TRANSFER && FAULT_LEFT -> faults++; end_transfer(VOTE_FAILED, 1) }               \
    :: d_step { NOT_ENTERED -> end_transfer(VOTE_FAILED, 0) }                                       \
    :: d_step { BESIDE_ENDS -> end_beside(VOTE_OK) }                                                \
    :: d_step { BESIDE_FAILS -> end_beside(VOTE_FAILED) }                                           \
    :: d_step { AT_WORK && FAULT_LEFT -> faults++; end_beside(VOTE_FAILED) }                        \
    :: d_step { BESIDE_ENDS && SHADOW && OWED_VERB == VERB_UPDATE && FAULT_LEFT ->                  \
        faults++; end_beside(VOTE_OK); incoming = OTHER_WEIGHTS }                                   \
    :: d_step { CAN_REFUSE(0) && FAULT_LEFT ->                                                        \
        faults++; verdict = verdict | 1; refused = outstanding[0] }                                 \
    :: d_step { session && phase == UPDATE_NONE && !expired -> expired = 1 }

/* refused at receipt, or cancelled before it is carried out */
#define CAN_REFUSE(f)                                                                               \
    (outstanding[f] != 0 && !(verdict & (1 << (f))) && update_call != outstanding[f])
