/* What only the shm engine can get wrong: the memory that comes with the welcome. */
#include "base/check.h"
#include "tests/lib/test_main.h"
#include "tests/lib/transfer/wte_rig.h"
#include "transfer/backends/shm/shm_stream.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RING_BYTES ((uint64_t)RIG_SLOTS * TRANSFER_CHUNK_BYTES)

static wte_rig_t rig;
static rig_tensors_t model;
static lk_prng_t prng;
static lk_error_t err;

static void setup(void)
{
    memset(&model, 0, sizeof model);
    lk_prng_seed(&prng, test_seed("shm"));
    err = LK_ERROR_INIT;
    rig_tensors_add(&model, LK_DTYPE_U8, 3 * TRANSFER_CHUNK_BYTES + 17, &prng);
    rig_tensors_add(&model, LK_DTYPE_F32, 10, &prng);
    rig_init(&rig, "shm", 1, 1, 1 << 16, &model);
}

static void teardown(void)
{
    rig_fini(&rig);
    rig_tensors_fini(&model);
}

/* Sealed as told, of `bytes` bytes. */
static int memory(uint64_t bytes, int seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ftruncate(fd, (off_t)bytes), 0);
    ck_assert(seals == 0 || fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

/* Welcomes rank 0 with this descriptor (-1: none), and expects to be refused. */
static void refused_with(int fd, const char *text)
{
    rig_post_init(&rig, 0);
    int own = rig.ring.fd;
    rig.ring.fd = fd;
    byte_stream_t *stream = rig_accept_from(&rig, 0);
    rig.ring.fd = own;
    uint8_t hello[TRANSFER_HELLO_SIZE + sizeof RIG_TOKEN - 1];
    rig_read(&rig, stream, hello, sizeof hello);
    lk_buf_t out;
    lk_buf_init(&out, 0);
    rig_frame(&out, (transfer_frame_t){TRANSFER_WELCOME, 7, 0, 0, 0, 0});
    stream->ops->admit(stream);
    struct iovec iov = {out.data, out.len};
    size_t moved = 0;
    ck_ok_text(stream->ops->writev(stream, &iov, 1, &moved, &err), err);
    lk_status_t st;
    while ((st = rig.ops->init_test(rig.state[0], &err)) == LK_INPROGRESS) {
        continue;
    }
    ck_assert_int_eq(st, LK_ERR_PEER);
    ck_assert_msg(strstr(err.text, text) != NULL, "%s", err.text);
    ck_assert_int_eq(rig.ops->init_test(rig.state[0], &err), LK_ERR_STATE);
    lk_buf_fini(&out);
    byte_stream_destroy(&stream);
    if (fd >= 0) {
        close(fd);
    }
}

START_TEST(memory_is_checked)
{
    refused_with(-1, "passed no shared memory");
    refused_with(memory(RING_BYTES, 0), "not sealed against shrinking");
    refused_with(memory(RING_BYTES, F_SEAL_GROW), "not sealed against shrinking");
    refused_with(memory(RING_BYTES - 1, F_SEAL_SHRINK),
                 "has 8388607 bytes, but 'bytes' is 8388608");
    refused_with(memory(2 * RING_BYTES, F_SEAL_SHRINK), "has 16777216 bytes");
    refused_with(memory(0, F_SEAL_SHRINK), "has 0 bytes");
    int file = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    ck_assert_int_ge(file, 0);
    refused_with(file, "not sealed");
    rig_connect(&rig);
    wte_update_t update = rig_update(&model, false, 1);
    rig_begin(&rig, &model, &update);
    rig_run(&rig);
    rig_expect_equal(&rig, 0, &model);
}
END_TEST

/* A payload longer than a slot would be read from beyond the ring's end. */
START_TEST(no_frame_is_longer_than_a_slot)
{
    rig_post_init(&rig, 0);
    byte_stream_t *stream = rig_accept_from(&rig, 0);
    rig_welcome(&rig, stream, 7);
    wte_update_t update = rig_update(&model, false, 1);
    rig_begin(&rig, NULL, &update);
    lk_buf_t out;
    lk_buf_init(&out, 0);
    rig_frame(&out, (transfer_frame_t){TRANSFER_DATA, 7, 1, 0, 0, TRANSFER_CHUNK_BYTES + 1});
    ck_assert(rig_write(&rig, stream, out.data, out.len));
    ck_assert_int_eq(rig_finish_rank(&rig, 0, &err), LK_ERR_PEER);
    ck_assert_msg(strstr(err.text, "frame of a wrong length") != NULL, "%s", err.text);
    lk_buf_fini(&out);
    byte_stream_destroy(&stream);
}
END_TEST

/* A rank that gives back slots that it was never shown, or out of order, must not make the trainer
 * write over what others still read. */
START_TEST(sender_checks_what_is_given_back)
{
    static const struct {
        uint64_t bucket, offset;
    } bad[] = {{0, 5 * TRANSFER_CHUNK_BYTES},
               {0, TRANSFER_CHUNK_BYTES + 1},
               {0, 0},
               {1, TRANSFER_CHUNK_BYTES},
               {0, UINT64_MAX},
               {UINT64_MAX, TRANSFER_CHUNK_BYTES}};
    for (size_t i = 0; i < LK_ARRAY_LEN(bad); i++) {
        byte_stream_t *rank = rig_dial(&rig), *accepted = NULL;
        ck_ok_text(rank->ops->connect(rank, &err), err);
        while (accepted == NULL) {
            accepted = rig_accept(&rig);
        }
        sender_add(rig.sender, accepted);
        lk_buf_t out;
        lk_buf_init(&out, 0);
        uint8_t hello[TRANSFER_HELLO_SIZE];
        transfer_hello_encode(&(transfer_hello_t){1, 0, 1, 0, 1, sizeof RIG_TOKEN - 1}, hello);
        lk_buf_append(&out, hello, sizeof hello);
        lk_buf_append(&out, RIG_TOKEN, sizeof RIG_TOKEN - 1);
        ck_assert(rig_write(&rig, rank, out.data, out.len));
        ck_ok_text(sender_greet(rig.sender), err);
        uint8_t head[TRANSFER_FRAME_SIZE];
        transfer_frame_t frame;
        rig_read(&rig, rank, head, sizeof head);
        ck_ok_text(transfer_frame_decode(head, &frame, &err), err);
        ck_ok_text(sender_begin(rig.sender, model.descs, (const void *const *)model.data, 1, false,
                                1, &err),
                   err);
        lk_buf_clear(&out);
        rig_frame(&out, (transfer_frame_t){TRANSFER_GO, frame.session, 1, 1, 0,
                                           3 * TRANSFER_CHUNK_BYTES + 17});
        ck_assert(rig_write(&rig, rank, out.data, out.len));
        ck_assert_int_eq(sender_step(rig.sender, &err), LK_INPROGRESS);
        ck_assert_int_eq(sender_step(rig.sender, &err), LK_INPROGRESS);
        lk_buf_clear(&out);
        rig_frame(&out, (transfer_frame_t){TRANSFER_TAKEN, frame.session, 1, bad[i].bucket,
                                           bad[i].offset, 0});
        ck_assert(rig_write(&rig, rank, out.data, out.len));
        ck_assert_int_eq(sender_step(rig.sender, &err), LK_ERR_PEER);
        ck_assert_msg(strstr(err.text, "unexpected TAKEN frame") != NULL, "%s", err.text);
        lk_buf_fini(&out);
        byte_stream_destroy(&rank);
        rig_trainer_dies(&rig);
        rig_trainer_starts(&rig);
    }
}
END_TEST

START_TEST(ring_sizes)
{
    shm_ring_t ring = {0};
    ck_assert_int_eq(shm_ring_create(&ring, 1, &err), LK_ERR_INVALID);
    ck_assert_int_eq(shm_ring_create(&ring, UINT64_MAX, &err), LK_ERR_INVALID);
    ck_assert_ptr_null(ring.map);
    ck_ok_text(shm_ring_create(&ring, 2, &err), err);
    ck_assert_int_eq(ftruncate(ring.fd, 0), -1);
    shm_ring_fini(&ring);
    shm_ring_fini(&ring);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("shm");
    TCase *tc = tcase_create("shm");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, memory_is_checked);
    tcase_add_test(tc, no_frame_is_longer_than_a_slot);
    tcase_add_test(tc, sender_checks_what_is_given_back);
    tcase_add_test(tc, ring_sizes);
    suite_add_tcase(suite, tc);
    return suite;
}
