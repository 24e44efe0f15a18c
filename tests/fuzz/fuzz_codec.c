/* Two frames from outside: decoding is refused, or gives a message that survives its own round
 * trip. Input: one byte of envelope length, the envelope, the body. */
#include "base/check.h"
#include "proto/codec.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    msg_t msg, again;
    lk_error_t err = LK_ERROR_INIT;
    if (len == 0) {
        return 0;
    }
    size_t n = LK_MIN((size_t)data[0], len - 1);
    if (msg_decode(data + 1, n, data + 1 + n, len - 1 - n, &msg, &err) != LK_OK) {
        CHECK(err.status < 0 && err.text[0] != '\0');
        return 0;
    }
    lk_buf_t envelope, body;
    lk_buf_init(&envelope, 0);
    lk_buf_init(&body, 0);
    CHECK(msg_encode(&msg, &envelope, &body, &err) == LK_OK);
    CHECK(msg_decode(envelope.data, envelope.len, body.data, body.len, &again, &err) == LK_OK);
    CHECK(msg_equal(&msg, &again));
    lk_buf_fini(&envelope);
    lk_buf_fini(&body);
    msg_fini(&again);
    msg_fini(&msg);
    return 0;
}
