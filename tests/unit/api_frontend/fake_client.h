/* fake_client.h: a caller of the API without a socket: what it got is kept for the test. */
#ifndef LK_TESTS_FAKE_CLIENT_H
#define LK_TESTS_FAKE_CLIENT_H

#include "api_frontend/api.h"

typedef struct {
    bool ended; /* answered, stream ended or discarded */
    bool discarded;
    int status; /* 0: none yet */
    bool streaming, stream_ended;
    bool deaf;  /* stream_data says that the client does not read */
    char *text; /* reply or stream so far; "" */
    size_t len;
    json_t *json;     /* of a whole reply */
    api_call_t *call; /* NULL once ended */
} fake_client_t;

/* path may have a query ("/pause?mode=keep"); body NULL: none. The result goes on changing until
 * ended. fc_fini frees it. */
void fc_call(fake_client_t *c, api_t *api, const char *method, const char *path, const char *body);
/* Same with an idempotency key and a bearer key (NULL: none). */
void fc_call_with(fake_client_t *c, api_t *api, const char *method, const char *path,
                  const char *body, const char *idempotency_key, const char *key);
void fc_gone(fake_client_t *c);
void fc_fini(fake_client_t *c);
/* A string or number inside c->json by a dotted path ("error.param", "choices.0.text"). */
const char *fc_str(const fake_client_t *c, const char *path);
int64_t fc_int(const fake_client_t *c, const char *path);
const json_t *fc_get(const fake_client_t *c, const char *path);

#endif
