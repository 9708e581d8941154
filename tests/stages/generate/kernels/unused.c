// Many jobs of one chunk on two threads, then one of two chunks: a thread's share that was long empty can still be taken.
#include <stdio.h>

#include "pool.h"

#define JOBS_OF_A_CALL 1000

static int done[2];

static void count(void *job, int64_t chunk, int thread) {
    (void)job, (void)thread;
    done[chunk]++;
}

static void many(void *argument, Member *me) {
    (void)argument;
    for (int i = 0; i < JOBS_OF_A_CALL; i++) pool_share(me, count, 0, 0, 1);
}

static void wide(void *argument, Member *me) {
    (void)argument;
    pool_share(me, count, 0, 0, 2);
}

int main(void) {
    pool_use(2);
    pool_together(wide, 0);
    for (int i = 0; i < 9000; i++) pool_together(many, 0); // more than 2^23 jobs
    pool_together(wide, 0);
    printf("%d %d\n", done[0], done[1]);
    return 0;
}
