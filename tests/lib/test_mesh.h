/* test_mesh.h: a whole mesh in one process and one thread, for suites that run over it. */
#ifndef LK_TESTS_TEST_MESH_H
#define LK_TESTS_TEST_MESH_H

#include "engine_core/dp/mesh.h"

#define TEST_MESH_MAX 8

/* Makes and connects `size` meshes; fails the test otherwise. */
void test_mesh_open(mesh_t **meshes, uint32_t size, uint64_t epoch);
/* Connects meshes that exist to each other under a new group epoch. */
void test_mesh_connect(mesh_t **meshes, uint32_t size, uint64_t epoch);
/* mesh_poll of each that is not NULL; dead peers are not looked at here. */
void test_mesh_poll(mesh_t **meshes, uint32_t size);

/* A point in time after which a test that waits has failed. */
typedef uint64_t test_deadline_t;
test_deadline_t test_deadline(void);
void test_not_over(test_deadline_t deadline);

#endif
