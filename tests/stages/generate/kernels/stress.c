// Many calls of many short jobs on the threads of pool.c. Each chunk is published once, after a thread computed it, and no
// job is lost or waited for in vain. Now and then a thread is held up in a chunk, as if Linux did not run it: the others do
// not wait for it where the chunk may be computed again. Threads that were moved may still run on every core.
#define _GNU_SOURCE
#include <dirent.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "pool.h"

#define MOST 64
#define JOBS 12 // of a call
#define PAUSE_NS 2000000

typedef struct {
    int64_t number, num_chunks;
    int is_published; // and not computed by one thread alone
    _Atomic int64_t computed[MOST], published[MOST];
} Job;

typedef struct {
    Job jobs[JOBS];
    _Atomic int inside;
} Call;

static _Atomic int64_t computed_again, held_up;
static int64_t pauses_every; // chunks; 0: never

static uint64_t mixed(uint64_t number) {
    number = (number ^ number >> 31) * 0x9e3779b97f4a7c15u;
    return (number ^ number >> 29) * 0xbf58476d1ce4e5b9u >> 32;
}

static void compute(void *argument, int64_t chunk, int thread) {
    Job *job = argument;
    if (chunk < 0 || chunk >= job->num_chunks || thread < 0 || thread >= pool_threads()) abort();
    if (atomic_fetch_add(&job->computed[chunk], 1)) {
        atomic_fetch_add(&computed_again, 1);
        return; // the first thread alone is held up
    }
    if (job->is_published && pauses_every && mixed((uint64_t)(job->number * MOST + chunk)) % (uint64_t)pauses_every == 0) {
        struct timespec pause = {0, PAUSE_NS};
        atomic_fetch_add(&held_up, 1);
        nanosleep(&pause, 0);
    }
}

static void publish(void *argument, int64_t chunk, int thread) {
    Job *job = argument;
    (void)thread;
    if (!atomic_load(&job->computed[chunk])) abort();
    atomic_fetch_add(&job->published[chunk], 1);
}

// What a job has written can be read by every thread that is past it.
static void check(const Job *job) {
    for (int64_t chunk = 0; chunk < job->num_chunks; chunk++) {
        int64_t computed = job->computed[chunk], published = job->published[chunk];
        if (computed >= 1 && (job->is_published ? published == 1 : computed == 1 && published == 0)) continue;
        printf("job %ld: chunk %ld of %ld was computed %ld times and published %ld times\n", job->number, chunk,
               job->num_chunks, computed, published);
        exit(1);
    }
}

static void together(void *argument, Member *me) {
    Call *call = argument;
    atomic_fetch_add(&call->inside, 1);
    for (int64_t number = 0; number < JOBS; number++) {
        Job *job = &call->jobs[number];
        pool_share(me, compute, job->is_published ? publish : 0, job, job->num_chunks);
        check(job);
    }
    atomic_fetch_sub(&call->inside, 1);
}

static int num_bound(void) { // threads that may not run wherever the first one may
    cpu_set_t first, other;
    int found = sched_getaffinity(0, sizeof first, &first);
    DIR *folder = opendir("/proc/self/task");
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (atoi(entry->d_name) && !sched_getaffinity(atoi(entry->d_name), sizeof other, &other))
            found += !CPU_EQUAL(&first, &other);
    if (folder) closedir(folder);
    return found;
}

int main(int count, char **arguments) {
    int64_t jobs = count > 1 ? atoll(arguments[1]) : 100000;
    int threads = count > 2 ? atoi(arguments[2]) : 6;
    pauses_every = count > 3 ? atoll(arguments[3]) : 0;
    uint64_t random = 1;
    for (int64_t number = 0; number < jobs; number += JOBS) {
        Call call = {0};
        for (int64_t i = 0; i < JOBS; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            call.jobs[i].number = number + i;
            call.jobs[i].num_chunks = (int64_t)(random >> 33) % (MOST + 1);
            call.jobs[i].is_published = random >> 41 & 1;
        }
        if (number % (100 * JOBS) == 0) pool_use(1 + (int)(random >> 43) % threads);
        pool_together(together, &call);
        if (call.inside) {
            printf("%d threads were still in a call that had returned\n", call.inside);
            return 1;
        }
        for (int64_t i = 0; i < JOBS; i++) check(&call.jobs[i]);
    }
    if (num_bound()) {
        printf("%d threads may not run on every core\n", num_bound());
        return 1;
    }
    if (held_up > 20 && !computed_again) {
        printf("%ld chunks were held up, and none was computed again\n", held_up);
        return 1;
    }
    printf("%ld jobs\n", jobs);
    return 0;
}
