/*
 * limits.h: every size limit of the wire. A reader checks them before it allocates; a writer checks
 * the same ones, so that nothing leaves a process that its peer would refuse.
 */
#ifndef LK_PROTO_LIMITS_H
#define LK_PROTO_LIMITS_H

#define WIRE_MAX_ENVELOPE 256u        /* bytes of frame 0 */
#define WIRE_MAX_BODY     (64u << 20) /* bytes of frame 1 */
#define WIRE_MAX_DEPTH    32u         /* any document; msgpack-c's own stack ends there */
#define WIRE_MAX_OBJECTS  (1u << 20)  /* msgpack values in one body; each costs a reader 24 bytes */

#define MSG_MAX_DEPTH 6u          /* nested arrays of a message body, a newer peer's included */
#define MSG_MAX_STR   (32u << 20) /* bytes of one STR */
#define MSG_MAX_BIN   (32u << 20) /* bytes of one BIN: 8 Mi token ids */
#define MSG_MAX_LIST  65536u      /* entries of one LIST */

#endif
