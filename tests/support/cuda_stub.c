/* A libcuda.so.1 without a GPU: device memory is host memory that is mapped, unmapped and counted as the driver would.
   Built and loaded by tests/support/cuda_stub.py. It knows what our code calls, and nothing of kernels. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef uint64_t u64;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, OPERATING_SYSTEM = 304, ILLEGAL_STATE = 401,
       NOT_FOUND = 500, NOT_READY = 600, LAUNCH_FAILED = 719 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static u64 capacity = (u64)64 << 30, used, registered, to_host, to_device, granularity = 2 << 20;
static int live_handles, live_mappings, reservations, synchronizations;

typedef struct { int fd; u64 size; int references; int counted; } Memory;
typedef struct { u64 address, size; Memory *memory; } Mapping;
static Mapping mappings[1 << 16];
static int mapping_count;

/* What the tests look at and set. */
void stub_set_capacity(u64 bytes) { capacity = bytes; }
u64 stub_used(void) { return used; }
u64 stub_registered(void) { return registered; }
u64 stub_to_host(void) { return to_host; }
u64 stub_to_device(void) { return to_device; }
int stub_live_handles(void) { return live_handles; }
int stub_live_mappings(void) { return live_mappings; }
int stub_reservations(void) { return reservations; }
int stub_synchronizations(void) { return synchronizations; }

int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_STUB"; return OK; }
int cuGetErrorString(int code, const char **name) { *name = "stub"; return OK; }
int cuDeviceGetCount(int *count) { *count = 2; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < 2 ? OK : 101; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  for (int i = 0; i < 16; ++i) uuid[i] = 0xf0 + i;
  uuid[15] = device;
  return OK;
}
int cuDeviceGetPCIBusId(char *text, int length, int device) { snprintf(text, length, "0000:0%d:00.0", device); return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 16 ? 132 : attribute == 39 ? 2048 : 9; /* multiprocessors, threads of each, a version */
  return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x1000; return OK; }
int cuCtxSetCurrent(void *context) { return OK; }
int cuCtxPushCurrent_v2(void *context) { return context == (void *)0x1000 ? OK : INVALID_VALUE; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)0x1000; return OK; }
int cuCtxSynchronize(void) { __atomic_add_fetch(&synchronizations, 1, __ATOMIC_SEQ_CST); return OK; }

/* The stack limit, with the local memory that a context holds for it: outside of "used", but it wants room as well. */
static u64 stack_limit = 1024, lowest_stack_limit = 0;
u64 stub_local_bytes(void) { return (stack_limit * 132 * 2048 + (2 << 20) - 1) >> 21 << 21; }
void stub_set_stack_limit(u64 bytes) { stack_limit = bytes; }
void stub_set_lowest_stack_limit(u64 bytes) { lowest_stack_limit = bytes; }
int cuCtxGetLimit(u64 *value, int limit) { *value = stack_limit; return limit == 0 ? OK : INVALID_VALUE; }
int cuCtxSetLimit(int limit, u64 value) {
  if (limit != 0 || value < lowest_stack_limit) return INVALID_VALUE;
  if (value > stack_limit && (value - stack_limit) * 132 * 2048 > capacity - used) return OUT_OF_MEMORY;
  stack_limit = value;
  return OK;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return OK; }
/* Copies are carried out as late as the driver may: when somebody waits for their stream. */
typedef struct { char *target; const char *source; u64 size; void *stream; } Copy;
static Copy copies[1 << 16];
static int copy_count, copies_until_failure;
void stub_fail_copy(u64 number) { copies_until_failure = number; }

static int submit(char *target, const char *source, u64 size, void *stream) {
  if (copy_count == 1 << 16) abort();
  copies[copy_count++] = (Copy){target, source, size, stream};
  return OK;
}
int cuStreamSynchronize(void *stream) {
  for (int i = 0; i < copy_count; ++i) {
    if (copies[i].stream != stream || !copies[i].size) continue;
    if (copies_until_failure && !--copies_until_failure) {
      /* Neither it nor what is behind it will be carried out. */
      for (int k = i; k < copy_count; ++k) if (copies[k].stream == stream) copies[k].size = 0;
      return LAUNCH_FAILED;
    }
    memcpy(copies[i].target, copies[i].source, copies[i].size);
    copies[i].size = 0;
  }
  return OK;
}
/* Memory that a copy has still to read or write must not go: the GPU would fault. */
static void check_idle(u64 address, u64 size) {
  for (int i = 0; i < copy_count; ++i) {
    u64 source = (u64)copies[i].source, target = (u64)copies[i].target;
    if (copies[i].size && ((source >= address && source < address + size) || (target >= address && target < address + size))) abort();
  }
}

int cuMemGetAllocationGranularity(u64 *size, const void *properties, int option) { *size = granularity; return OK; }

int cuMemAddressReserve(u64 *address, u64 size, u64 alignment, u64 hint, u64 flags) {
  if (size == 0 || size % granularity) return INVALID_VALUE;
  char *start = mmap(0, size + granularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return OUT_OF_MEMORY;
  char *aligned = (char *)(((u64)start + granularity - 1) / granularity * granularity);
  if (aligned > start) munmap(start, aligned - start);
  if (aligned + size < start + size + granularity) munmap(aligned + size, start + granularity - aligned);
  __atomic_add_fetch(&reservations, 1, __ATOMIC_SEQ_CST);
  *address = (u64)aligned;
  return OK;
}

int cuMemAddressFree(u64 address, u64 size) {
  pthread_mutex_lock(&lock);
  int busy = 0;
  for (int i = 0; i < mapping_count; ++i)
    if (mappings[i].memory && mappings[i].address < address + size && mappings[i].address + mappings[i].size > address)
      busy = 1;
  if (!busy) { munmap((void *)address, size); --reservations; }
  pthread_mutex_unlock(&lock);
  return busy ? INVALID_VALUE : OK;
}

static void drop(Memory *memory) {
  if (--memory->references) return;
  if (memory->counted) used -= memory->size;
  --live_handles;
  close(memory->fd);
  free(memory);
}

int cuMemCreate(u64 *handle, u64 size, const int *properties, u64 flags) {
  if (size == 0 || size % granularity || properties[0] != 1 || properties[2] != 1) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  int full = used + size > capacity;
  if (!full) {
    Memory *memory = malloc(sizeof *memory);
    *memory = (Memory){memfd_create("stub", 0), size, 1, 1};
    if (ftruncate(memory->fd, size)) abort();
    used += size;
    ++live_handles;
    *handle = (u64)memory;
  }
  pthread_mutex_unlock(&lock);
  return full ? OUT_OF_MEMORY : OK;
}

int cuMemRelease(u64 handle) {
  pthread_mutex_lock(&lock);
  drop((Memory *)handle);
  pthread_mutex_unlock(&lock);
  return OK;
}

int cuMemMap(u64 address, u64 size, u64 offset, u64 handle, u64 flags) {
  Memory *memory = (Memory *)handle;
  if (size != memory->size || offset) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  int result = OK;
  for (int i = 0; i < mapping_count; ++i)
    if (mappings[i].memory && mappings[i].address < address + size && mappings[i].address + mappings[i].size > address)
      result = INVALID_VALUE;
  if (result == OK) {
    void *at = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0);
    if (at == MAP_FAILED) abort();
    int slot = 0;
    while (slot < mapping_count && mappings[slot].memory) ++slot;
    if (slot == mapping_count) ++mapping_count;
    mappings[slot] = (Mapping){address, size, memory};
    ++memory->references;
    ++live_mappings;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int cuMemSetAccess(u64 address, u64 size, const int *access, u64 count) {
  if (count != 1 || access[0] != 1) return INVALID_VALUE;
  return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}

int cuMemUnmap(u64 address, u64 size) {
  check_idle(address, size);
  pthread_mutex_lock(&lock);
  int result = INVALID_VALUE; /* only whole mappings */
  for (int i = 0; i < mapping_count; ++i)
    if (mappings[i].memory && mappings[i].address == address && mappings[i].size == size) {
      mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
      drop(mappings[i].memory);
      mappings[i].memory = 0;
      --live_mappings;
      result = OK;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

int cuMemExportToShareableHandle(void *out, u64 handle, int kind, u64 flags) {
  *(int *)out = dup(((Memory *)handle)->fd);
  return OK;
}

int cuMemImportFromShareableHandle(u64 *handle, void *descriptor, int kind) {
  struct stat status;
  int fd = dup((int)(intptr_t)descriptor);
  if (fd < 0 || fstat(fd, &status)) return INVALID_VALUE;
  Memory *memory = malloc(sizeof *memory);
  *memory = (Memory){fd, status.st_size, 1, 0};
  pthread_mutex_lock(&lock);
  ++live_handles;
  pthread_mutex_unlock(&lock);
  *handle = (u64)memory;
  return OK;
}

int cuMemAlloc_v2(u64 *address, u64 size) { *address = (u64)calloc(1, size); return OK; }
int cuMemFree_v2(u64 address) { free((void *)address); return OK; }
int cuMemsetD8_v2(u64 address, unsigned char value, u64 size) { memset((void *)address, value, size); return OK; }
int cuMemcpyDtoH_v2(void *host, u64 device, u64 size) { memcpy(host, (void *)device, size); return OK; }
int cuMemcpyHtoD_v2(u64 device, const void *host, u64 size) { memcpy((void *)device, host, size); return OK; }
int cuMemcpyDtoHAsync_v2(void *host, u64 device, u64 size, void *stream) {
  to_host += size;
  return submit(host, (char *)device, size, stream);
}
int cuMemcpyHtoDAsync_v2(u64 device, const void *host, u64 size, void *stream) {
  to_device += size;
  return submit((char *)device, host, size, stream);
}
int cuMemHostRegister_v2(void *address, u64 size, unsigned flags) { registered += size; return OK; }
int cuMemHostUnregister(void *address) { registered = 0; return OK; }

/* Checkpoints: a state for each pid, and what the next verb is to answer. */
static struct { int pid, state; } processes[64];
static int next_code, verb_ms;
static unsigned last_timeout_ms;
void stub_set_next(int code) { next_code = code; }
void stub_set_verb_ms(int ms) { verb_ms = ms; }
unsigned stub_last_timeout_ms(void) { return last_timeout_ms; }

static int *state_of(int pid) {
  for (int i = 0; i < 64; ++i) {
    if (processes[i].pid == 0) processes[i].pid = pid;
    if (processes[i].pid == pid) return &processes[i].state;
  }
  abort();
}

static int step(int pid, int from, int to) {
  if (verb_ms) usleep(verb_ms * 1000);
  pthread_mutex_lock(&lock);
  int *state = state_of(pid), code = next_code;
  next_code = 0;
  if (!code && *state != from) code = ILLEGAL_STATE;
  if (!code) *state = to;
  pthread_mutex_unlock(&lock);
  return code;
}

int cuCheckpointProcessGetState(int pid, int *state) { *state = *state_of(pid); return OK; }
int cuCheckpointProcessLock(int pid, const unsigned *arguments) {
  last_timeout_ms = arguments ? arguments[0] : 0;
  return step(pid, 0, 1);
}
int cuCheckpointProcessCheckpoint(int pid, const void *arguments) { return step(pid, 1, 2); }
int cuCheckpointProcessRestore(int pid, const void *arguments) { return step(pid, 2, 1); }
int cuCheckpointProcessUnlock(int pid, const void *arguments) { return step(pid, 1, 0); }

int cuGetProcAddress_v2(const char *symbol, void **function, int version, u64 flags, int *status) {
  static void *self;
  Dl_info info;
  char name[128];
  if (!self && dladdr((void *)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  snprintf(name, sizeof name, "%s_v2", symbol);
  *function = strcmp(symbol, "cuGetProcAddress") ? dlsym(self, name) : (void *)cuGetProcAddress_v2;
  if (!*function) *function = dlsym(self, symbol);
  if (status) *status = *function ? 0 : 1;
  return *function ? OK : NOT_FOUND;
}
int cuGetProcAddress(const char *symbol, void **function, int version, u64 flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, 0);
}
