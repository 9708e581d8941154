// Many short jobs on the threads of pool.c: each chunk is computed once, and no job is lost or waited for in vain. Threads
// that were moved may still run on every core.
#define _GNU_SOURCE
#include <dirent.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "pool.h"

#define MOST 64

typedef struct {
    int64_t number, num_chunks;
    _Atomic int64_t computed[MOST];
} Job;

static void chunk_of(void *argument, int64_t chunk, int thread) {
    Job *job = argument;
    if (chunk < 0 || chunk >= job->num_chunks || thread < 0 || thread >= pool_threads()) abort();
    atomic_fetch_add(&job->computed[chunk], job->number);
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
    uint64_t random = 1;
    for (int64_t number = 1; number <= jobs; number++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        if (number % 1000 == 1) pool_use(1 + (int)(random >> 40) % threads);
        Job job = {number, 1 + (int64_t)(random >> 33) % MOST, {0}};
        pool_run(chunk_of, &job, job.num_chunks);
        for (int64_t chunk = 0; chunk < job.num_chunks; chunk++)
            if (job.computed[chunk] != number) {
                printf("job %ld: chunk %ld of %ld was not computed once\n", number, chunk, job.num_chunks);
                return 1;
            }
    }
    if (num_bound()) {
        printf("%d threads may not run on every core\n", num_bound());
        return 1;
    }
    printf("%ld jobs\n", jobs);
    return 0;
}
