#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
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

// ---- a core for each thread
//
// Where other processes need the cores now and then, Linux lets a thread and the caller share one. That another core is
// free again it sees some ticks later, after 8 to 12 ms: for longer than many steps take. So the caller sends a thread
// that is on its own core to another one. If that is busy, the thread does not begin the jobs that follow. Then it is
// brought back, and the next try comes later.

#define FIRST_PAUSE_NS 500000
#define LONGEST_PAUSE_NS 2000000
#define PATIENCE_NS 100000

static struct {
    _Alignas(64) _Atomic int id; // of Linux; 0: it has not begun
    _Atomic int core;            // where it began its last job
    _Atomic uint32_t jobs;       // that it has begun
} threads[MOST_THREADS];

// For the caller alone.
static struct {
    int thread;    // that was sent to another core; 0: none
    uint32_t jobs; // that it had begun before
    int64_t sent_ns, next_ns, pause_ns;
} sent = {.pause_ns = FIRST_PAUSE_NS};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// Move a thread to *core*, or away from it. Later it may run on the same cores as before. Returns whether there is such a
// core.
static int move(int thread, int core, int away) {
    cpu_set_t allowed, wanted;
    int id = atomic_load(&threads[thread].id);
    if (sched_getaffinity(id, sizeof allowed, &allowed)) return 0;
    wanted = allowed;
    if (away) CPU_CLR(core, &wanted);
    else {
        CPU_ZERO(&wanted);
        CPU_SET(core, &wanted);
    }
    if (!CPU_COUNT(&wanted) || sched_setaffinity(id, sizeof wanted, &wanted)) return 0;
    sched_setaffinity(id, sizeof allowed, &allowed);
    return 1;
}

// Called with each job, once the threads are awake.
static void spread(void) {
    int core = sched_getcpu(), used = atomic_load_explicit(&pool.threads, memory_order_relaxed);
    int64_t now = now_ns();
    if (sent.thread) {
        if (atomic_load_explicit(&threads[sent.thread].jobs, memory_order_relaxed) != sent.jobs) {
            sent.thread = 0;
            sent.pause_ns = FIRST_PAUSE_NS;
        } else if (now - sent.sent_ns > PATIENCE_NS) {
            move(sent.thread, core, 0);
            sent.thread = 0;
            sent.pause_ns = 2 * sent.pause_ns < LONGEST_PAUSE_NS ? 2 * sent.pause_ns : LONGEST_PAUSE_NS;
        }
    } else if (now >= sent.next_ns) {
        sent.next_ns = now + sent.pause_ns;
        for (int thread = 1; thread < used && !sent.thread; thread++) {
            uint32_t jobs = atomic_load_explicit(&threads[thread].jobs, memory_order_relaxed);
            if (!jobs || atomic_load_explicit(&threads[thread].core, memory_order_relaxed) != core) continue;
            if (!move(thread, core, 1)) continue;
            sent.thread = thread;
            sent.jobs = jobs;
            sent.sent_ns = now;
        }
    }
}

// ---- jobs

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
    atomic_store(&threads[thread].id, (int)syscall(SYS_gettid));
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
        atomic_store_explicit(&threads[thread].core, sched_getcpu(), memory_order_relaxed);
        atomic_fetch_add_explicit(&threads[thread].jobs, 1, memory_order_relaxed);
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
    spread();
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
