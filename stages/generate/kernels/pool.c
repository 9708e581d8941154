#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "entry.h"

// Pauses before a thread sleeps: each takes 40 to 140 cycles, so all take 20 to 100 microseconds.
#define SPINS 2000

#define COUNT_BITS 20
#define COUNT_MASK ((1u << COUNT_BITS) - 1)

static struct {
    // generation (24 bits), number of chunks (20), next chunk (20). All in one word, so that a thread that comes late
    // cannot claim a chunk of the job that follows.
    _Alignas(64) _Atomic uint64_t ticket;
    // What idle threads sleep on; it changes with each job.
    _Alignas(64) _Atomic uint32_t jobs;
    _Atomic int sleepers;
    // Chunks that are done; what the caller sleeps on.
    _Alignas(64) _Atomic uint32_t done;
    _Atomic int caller_sleeps;
    _Alignas(64) _Atomic(Chunk) function;
    _Atomic(void *) job;
    _Atomic int threads; // that may work
    int started;         // that exist, the caller among them
} pool = {.threads = 1, .started = 1};

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static void wake(_Atomic uint32_t *word, int threads) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, threads, 0, 0, 0); }

static uint32_t generation_of(uint64_t ticket) { return (uint32_t)(ticket >> (2 * COUNT_BITS)); }

// Claim and compute chunks of a job until none is left.
static void work(uint32_t generation, int thread) {
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
        // These belong to the ticket if it still has chunks: a new job is set only when the last one is done.
        Chunk function = atomic_load_explicit(&pool.function, memory_order_relaxed);
        void *job = atomic_load_explicit(&pool.job, memory_order_relaxed);
        uint32_t chunks = (uint32_t)(ticket >> COUNT_BITS) & COUNT_MASK, next = (uint32_t)ticket & COUNT_MASK;
        if (generation_of(ticket) != generation || next >= chunks) return;
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1)) continue;
        function(job, next, thread);
        if (atomic_fetch_add(&pool.done, 1) + 1 == chunks && atomic_load(&pool.caller_sleeps)) wake(&pool.done, 1);
    }
}

static void *run_thread(void *argument) {
    int thread = (int)(intptr_t)argument;
    uint32_t seen = generation_of(atomic_load(&pool.ticket));
    enter(); // for the life of the thread
    for (;;) {
        uint32_t generation;
        int spins = 0;
        while ((generation = generation_of(atomic_load_explicit(&pool.ticket, memory_order_acquire))) == seen) {
            if (++spins < SPINS) {
                pause_briefly();
                continue;
            }
            uint32_t jobs = atomic_load(&pool.jobs);
            atomic_fetch_add(&pool.sleepers, 1);
            if (generation_of(atomic_load(&pool.ticket)) == seen) sleep_while(&pool.jobs, jobs);
            atomic_fetch_sub(&pool.sleepers, 1);
            spins = 0;
        }
        seen = generation;
        if (thread < atomic_load_explicit(&pool.threads, memory_order_relaxed)) work(generation, thread);
    }
    return 0;
}

int pool_use(int threads) {
    if (threads < 1) threads = 1;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    sigset_t all, before; // signals are for the threads of Python
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool.started < threads; pool.started++) {
        pthread_t one;
        if (pthread_create(&one, 0, run_thread, (void *)(intptr_t)pool.started)) break;
        pthread_detach(one);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    int used = threads < pool.started ? threads : pool.started;
    atomic_store(&pool.threads, used);
    return used;
}

int pool_threads(void) { return atomic_load_explicit(&pool.threads, memory_order_relaxed); }

void pool_run(Chunk function, void *job, int64_t num_chunks) {
    if (num_chunks <= 1 || num_chunks > MOST_CHUNKS || pool_threads() == 1) {
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) function(job, chunk, 0);
        return;
    }
    atomic_store_explicit(&pool.function, function, memory_order_relaxed);
    atomic_store_explicit(&pool.job, job, memory_order_relaxed);
    atomic_store(&pool.done, 0);
    uint32_t generation = (generation_of(atomic_load(&pool.ticket)) + 1) & 0xffffff;
    atomic_store(&pool.ticket, (uint64_t)generation << (2 * COUNT_BITS) | (uint64_t)num_chunks << COUNT_BITS);
    atomic_fetch_add(&pool.jobs, 1);
    if (atomic_load(&pool.sleepers)) wake(&pool.jobs, INT_MAX);
    work(generation, 0);
    int spins = 0;
    uint32_t done;
    while ((done = atomic_load_explicit(&pool.done, memory_order_acquire)) != (uint32_t)num_chunks) {
        if (++spins < SPINS) {
            pause_briefly();
            continue;
        }
        atomic_store(&pool.caller_sleeps, 1);
        if ((done = atomic_load(&pool.done)) != (uint32_t)num_chunks) sleep_while(&pool.done, done);
        atomic_store(&pool.caller_sleeps, 0);
    }
}
