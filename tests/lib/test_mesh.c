#include "tests/lib/test_mesh.h"
#include "base/env.h"
#include "tests/lib/test_main.h"

test_deadline_t test_deadline(void)
{
    return lk_env_now_ns(lk_env_real()) + 30 * LK_SECOND_NS;
}

void test_not_over(test_deadline_t deadline)
{
    ck_assert_msg(lk_env_now_ns(lk_env_real()) < deadline, "waited too long");
}

void test_mesh_connect(mesh_t **meshes, uint32_t size, uint64_t epoch)
{
    const char *addresses[TEST_MESH_MAX];
    lk_error_t err = LK_ERROR_INIT;
    for (uint32_t r = 0; r < size; r++) {
        addresses[r] = mesh_address(meshes[r]);
    }
    for (uint32_t r = 0; r < size; r++) {
        ck_assert_msg(mesh_connect_post(meshes[r], epoch, size, NULL, addresses, &err) == LK_OK,
                      "%s", err.text);
    }
    test_deadline_t deadline = test_deadline();
    for (uint32_t done = 0; done < size;) {
        done = 0;
        for (uint32_t r = 0; r < size; r++) {
            lk_status_t status = mesh_connect_test(meshes[r], &err);
            ck_assert_msg(status >= 0, "%s", err.text);
            done += status == LK_OK;
        }
        test_not_over(deadline);
    }
}

void test_mesh_open(mesh_t **meshes, uint32_t size, uint64_t epoch)
{
    lk_error_t err = LK_ERROR_INIT;
    for (uint32_t r = 0; r < size; r++) {
        ck_assert_msg(mesh_new(r, &meshes[r], &err) == LK_OK, "%s", err.text);
    }
    test_mesh_connect(meshes, size, epoch);
}

void test_mesh_poll(mesh_t **meshes, uint32_t size)
{
    for (uint32_t r = 0; r < size; r++) {
        lk_error_t err;
        if (meshes[r] != NULL) {
            lk_status_t status = mesh_poll(meshes[r], &err);
            ck_assert(status == LK_OK || status == LK_ERR_PEER);
        }
    }
}
