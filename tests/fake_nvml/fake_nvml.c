/* A libnvidia-ml.so.1 for tests: it answers from a recorded machine's nvml.json.
 *
 * The real nvidia-ml-py runs over it unchanged. Structures, symbol versions and error codes are
 * NVML's; a symbol that is not here is one that the driver does not have. What is asked of it:
 *
 *   FAKE_NVML_JSON     the reading to give back (rte/discovery/reading.py has the format)
 *   FAKE_NVML_CONTROL  faults, one a line (tests/fake_nvml/__init__.py has the grammar)
 *   FAKE_NVML_DEVICE   stands for /dev/nvidiactl: each open session holds it open once, so that
 *                      /proc/<pid>/fd shows what it shows on a real machine
 *   FAKE_NVML_JOURNAL  gets a line for each nvmlInit and nvmlShutdown that succeeds
 *
 * Both files are looked at again at every call and may change while a client runs. A handle names
 * its GPU by PCI address, so it outlives such a change or answers GPU_IS_LOST. One lock covers
 * every call; it is let go where a call hangs or waits, as other threads of a client go on there.
 */

#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

typedef int nvmlReturn_t;
enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    VERSION_MISMATCH = 25,
    UNKNOWN = 999
};

/* NVML's structures. tests/test_nvml.py compares them with nvidia-ml-py's. */

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType;
    nvmlReturn_t nvmlReturn;
    union {
        double dVal;
        unsigned uiVal;
        unsigned long ulVal;
        unsigned long long ullVal;
        long long sllVal;
        int siVal;
        unsigned short usVal;
    } value;
} nvmlFieldValue_t;

typedef struct {
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state; /* one byte; nvidia-ml-py reads the padding behind it too, so we soil it */
} nvmlGpuFabricInfo_t;

typedef struct {
    unsigned version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state;
    unsigned healthMask;
} nvmlGpuFabricInfo_v2_t;

typedef struct {
    unsigned version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state;
    unsigned healthMask;
    unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t;

typedef struct {
    unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount,
        sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

typedef struct {
    unsigned version;
    int sensorType;
    int temperature;
} nvmlTemperature_v1_t;

typedef struct handle {
    char bus_id[32];
    char mig[96]; /* UUID of the MIG device; empty for a GPU */
    struct handle *next;
} *nvmlDevice_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

typedef struct registration {
    nvmlDevice_t device;
    unsigned long long types;
    struct registration *next;
} registration;

typedef struct event_set {
    long last; /* the last event number that was delivered, or was there before the set */
    registration *registered;
} *nvmlEventSet_t;

EXPORT const unsigned fake_nvml_sizes[] = {
    sizeof(nvmlPciInfo_t),          sizeof(nvmlMemory_t),           sizeof(nvmlMemory_v2_t),
    sizeof(nvmlFieldValue_t),       sizeof(nvmlGpuFabricInfo_t),    sizeof(nvmlGpuFabricInfo_v2_t),
    sizeof(nvmlGpuFabricInfo_v3_t), sizeof(nvmlDeviceAttributes_t), sizeof(nvmlTemperature_v1_t),
    sizeof(nvmlEventData_t)};

/* JSON: a tree of values, freed as a whole. Integers are kept in 64 bits, as affinity words need. */

typedef struct json {
    enum { NUL, BOOLEAN, NUMBER, STRING, ARRAY, OBJECT } kind;
    long long number; /* NUMBER and BOOLEAN */
    char *text;       /* STRING */
    char *key;        /* in an OBJECT */
    struct json *first, *next;
} json;

static void json_free(json *v) {
    while (v) {
        json *next = v->next;
        json_free(v->first);
        free(v->text);
        free(v->key);
        free(v);
        v = next;
    }
}

static const char *blank(const char *s) {
    while (isspace((unsigned char)*s)) s++;
    return s;
}

/* The four digits of \uXXXX, or -1. */
static long hex4(const char *s) {
    char digits[5] = {0};
    for (int i = 0; i < 4; i++) {
        if (!isxdigit((unsigned char)s[i])) return -1;
        digits[i] = s[i];
    }
    return strtol(digits, NULL, 16);
}

static const char *json_string(const char *s, char **out) {
    if (*s++ != '"') return NULL;
    char *text = malloc(strlen(s) + 1), *to = text; /* no escape is shorter than what it stands for */
    while (*s && *s != '"') {
        if (*s != '\\') {
            *to++ = *s++;
            continue;
        }
        static const char names[] = "\"\\/bfnrt", means[] = "\"\\/\b\f\n\r\t";
        const char *name = s[1] ? strchr(names, s[1]) : NULL;
        long code = s[1] == 'u' ? hex4(s + 2) : -1;
        if (name) {
            *to++ = means[name - names];
            s += 2;
        } else if (code >= 0) { /* surrogate pairs are kept as two: nothing of NVML's has them */
            if (code >= 0x800) *to++ = (char)(0xE0 | code >> 12);
            if (code >= 0x80) *to++ = (char)((code >= 0x800 ? 0x80 : 0xC0) | (code >> 6 & (code >= 0x800 ? 0x3F : 0x1F)));
            *to++ = (char)(code >= 0x80 ? 0x80 | (code & 0x3F) : code);
            s += 6;
        } else {
            free(text);
            return NULL;
        }
    }
    *to = 0;
    *out = text;
    return *s == '"' ? s + 1 : NULL;
}

static const char *json_value(const char *s, json *v, int depth) {
    s = blank(s);
    if (depth > 16) return NULL;
    if (*s == '"') {
        v->kind = STRING;
        return json_string(s, &v->text);
    }
    if (*s == '{' || *s == '[') {
        const char close = *s == '{' ? '}' : ']';
        v->kind = *s == '{' ? OBJECT : ARRAY;
        json **tail = &v->first;
        s = blank(s + 1);
        if (*s == close) return s + 1;
        for (;;) {
            json *item = *tail = calloc(1, sizeof *item);
            tail = &item->next;
            if (v->kind == OBJECT) {
                if (!(s = json_string(blank(s), &item->key))) return NULL;
                s = blank(s);
                if (*s++ != ':') return NULL;
            }
            if (!(s = json_value(s, item, depth + 1))) return NULL;
            s = blank(s);
            if (*s == close) return s + 1;
            if (*s++ != ',') return NULL;
        }
    }
    static const struct {
        const char *word;
        int kind, number;
    } words[] = {{"true", BOOLEAN, 1}, {"false", BOOLEAN, 0}, {"null", NUL, 0}};
    for (int i = 0; i < 3; i++)
        if (!strncmp(s, words[i].word, strlen(words[i].word))) {
            v->kind = words[i].kind;
            v->number = words[i].number;
            return s + strlen(words[i].word);
        }
    char *end;
    v->kind = NUMBER;
    v->number = *s == '-' ? strtoll(s, &end, 10) : (long long)strtoull(s, &end, 10);
    if (end == s || *end == '.' || *end == 'e' || *end == 'E') return NULL; /* NVML has no such */
    return end;
}

/* The member of an object, or NULL where it is absent or null. */
static json *member(const json *object, const char *key) {
    for (json *v = object ? object->first : NULL; v; v = v->next)
        if (v->key && !strcmp(v->key, key)) return v->kind == NUL ? NULL : v;
    return NULL;
}

static json *item(const json *array, int at) {
    json *v = array ? array->first : NULL;
    while (v && at-- > 0) v = v->next;
    return v;
}

static long long number(const json *object, const char *key, long long otherwise) {
    json *v = member(object, key);
    return v ? v->number : otherwise;
}

/* The two files, and what is known of them. */

typedef struct {
    const char *variable;
    struct timespec changed;
    ino_t inode;
    off_t size;
    int known;
} watched;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static watched reading_file = {.variable = "FAKE_NVML_JSON"};
static watched control_file = {.variable = "FAKE_NVML_CONTROL"};
static json *reading;
static char *control; /* the whole text; NULL where there is none */
static struct handle *handles;
static int sessions, session_fds[64];

static int changed(watched *file) {
    const char *path = getenv(file->variable);
    struct stat now;
    if (!path || stat(path, &now)) {
        int was = file->known;
        file->known = 0;
        return was;
    }
    if (file->known && now.st_ino == file->inode && now.st_size == file->size &&
        now.st_mtim.tv_sec == file->changed.tv_sec && now.st_mtim.tv_nsec == file->changed.tv_nsec)
        return 0;
    file->known = 1;
    file->changed = now.st_mtim;
    file->inode = now.st_ino;
    file->size = now.st_size;
    return 1;
}

static char *content(const watched *file) {
    const char *path = getenv(file->variable);
    FILE *in = path ? fopen(path, "r") : NULL;
    if (!in) return NULL;
    size_t size = 0, got;
    char *text = NULL;
    do {
        text = realloc(text, size + 65537);
        got = fread(text + size, 1, 65536, in);
        size += got;
    } while (got);
    fclose(in);
    text[size] = 0;
    return text;
}

static void look(void) {
    if (changed(&control_file)) {
        free(control);
        control = content(&control_file);
    }
    if (!changed(&reading_file)) return;
    char *text = content(&reading_file);
    json *fresh = calloc(1, sizeof *fresh);
    const char *end = text ? json_value(text, fresh, 0) : NULL;
    if (end && !*blank(end) && fresh->kind == OBJECT) {
        json_free(reading);
        reading = fresh;
    } else { /* said aloud, then the old one stays: a test that writes nonsense should see why */
        fprintf(stderr, "fake libnvidia-ml: %s=%s is no JSON object\n", reading_file.variable,
                getenv(reading_file.variable) ? getenv(reading_file.variable) : "(unset)");
        json_free(fresh);
        reading_file.known = 0;
    }
    free(text);
}

/* The next line of the control file from `*at` on whose first word is `verb`: its other words. */
#define WORDS 8
static int directive(const char **at, const char *verb, char words[WORDS][64]) {
    while (*at && **at) {
        const char *line = *at, *end = strchr(line, '\n');
        *at = end ? end + 1 : line + strlen(line);
        char first[64];
        int used = 0, count = 0, n;
        if (sscanf(line, " %63s%n", first, &used) != 1 || strcmp(first, verb) ||
            (end && line + used > end))
            continue;
        memset(words, 0, WORDS * 64);
        for (const char *s = line + used; count < WORDS; s += n, count++) {
            while (*s == ' ' || *s == '\t') s++;
            if (!*s || *s == '\n' || sscanf(s, "%63s%n", words[count], &n) != 1) break;
        }
        return count ? count : -1; /* -1: the bare word */
    }
    return 0;
}

/* A GPU of the file: its position there, its bus id or its UUID. */
static int names(const char *word, const json *gpu) {
    if (!strcmp(word, "*")) return 1;
    char position[24];
    snprintf(position, sizeof position, "%lld", number(gpu, "index", -1));
    json *bus = member(gpu, "bus_id"), *uuid = member(gpu, "uuid");
    return !strcmp(word, position) || (bus && !strcasecmp(word, bus->text)) ||
           (uuid && !strcmp(word, uuid->text));
}

/* The last line `verb GPU …`: its words after the GPU. */
static int about(const json *gpu, const char *verb, char words[WORDS][64]) {
    char line[WORDS][64];
    int found = 0, count;
    const char *at = control;
    while ((count = directive(&at, verb, line)))
        if (count > 0 && names(line[0], gpu)) {
            found = count;
            memcpy(words, line + 1, (WORDS - 1) * 64);
            memset(words + WORDS - 1, 0, 64);
        }
    return found;
}

static void pass(double seconds) {
    pthread_mutex_unlock(&lock);
    if (seconds < 0)
        for (;;) pause();
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&t, &t) && errno == EINTR) continue;
    pthread_mutex_lock(&lock);
}

/* What the control file says of this call: the code to fail with, or 0. May hang, may abort. */
static nvmlReturn_t fault(const char *call, const json *gpu) {
    char words[WORDS][64];
    const char *at = control;
    double wait = 0;
    nvmlReturn_t code = OK;
    while (directive(&at, "call", words)) {
        char *where = strchr(words[0], '@');
        if (where) {
            *where++ = 0;
            if (!gpu || !names(where, gpu)) continue;
        } else if (gpu) {
            continue; /* lines without a GPU were obeyed when the call began */
        }
        if (strcmp(words[0], "*") && strcmp(words[0], call)) continue;
        if (!strcmp(words[1], "abort")) abort();
        if (!strcmp(words[1], "hang")) wait = words[2][0] ? atof(words[2]) : -1;
        if (!strcmp(words[1], "fail")) code = atoi(words[2]);
    }
    if (wait) pass(wait);
    return code;
}

static void leave(const int *held) {
    if (*held) pthread_mutex_unlock(&lock);
}

static nvmlReturn_t enter(const char *call) {
    pthread_mutex_lock(&lock);
    look();
    nvmlReturn_t code = fault(call, NULL);
    if (code) return code;
    return sessions || !strncmp(call, "nvmlInit", 8) ? OK : UNINITIALIZED;
}

/* Begins a call: takes the lock until it returns, and obeys the control file. */
#define CALL                                         \
    __attribute__((cleanup(leave))) int held_ = 1;   \
    nvmlReturn_t code_ = enter(__func__);            \
    if (code_) return code_

/* GPUs, as enumerated: those of the file less the removed ones. */

static json *gpus(void) {
    json *all = member(reading, "gpus");
    return all ? all->first : NULL;
}

static int removed(const json *gpu) {
    char words[WORDS][64];
    return about(gpu, "removed", words);
}

static json *gpu_at(unsigned index) {
    for (json *gpu = gpus(); gpu; gpu = gpu->next)
        if (!removed(gpu) && !index--) return gpu;
    return NULL;
}

static nvmlDevice_t handle_of(const char *bus_id, const char *mig) {
    for (struct handle *h = handles; h; h = h->next)
        if (!strcmp(h->bus_id, bus_id) && !strcmp(h->mig, mig)) return h;
    struct handle *h = calloc(1, sizeof *h);
    snprintf(h->bus_id, sizeof h->bus_id, "%s", bus_id);
    snprintf(h->mig, sizeof h->mig, "%s", mig);
    h->next = handles;
    return handles = h;
}

/* Why the GPU does not answer, or 0. A recorded `error` with a bus id lets that much be asked. */
static nvmlReturn_t silence(const json *gpu, int opening) {
    char words[WORDS][64];
    if (about(gpu, "lost", words)) return words[0][0] ? atoi(words[0]) : GPU_IS_LOST;
    json *error = member(gpu, "error");
    if (!opening || !member(gpu, "bus_id")) {
        if (error) return (nvmlReturn_t)error->number;
        if (!opening && about(gpu, "broken", words)) return words[0][0] ? atoi(words[0]) : UNKNOWN;
    }
    return OK;
}

static nvmlReturn_t find(nvmlDevice_t handle, const char *call, json **found) {
    int known = 0; /* also a wild pointer must not crash the client */
    for (struct handle *h = handles; h && !known; h = h->next) known = h == handle;
    if (!known) return INVALID_ARGUMENT;
    for (json *gpu = gpus(); gpu; gpu = gpu->next) {
        json *bus = member(gpu, "bus_id");
        if (!bus || removed(gpu) || strcasecmp(bus->text, handle->bus_id)) continue;
        *found = gpu;
        nvmlReturn_t code = silence(gpu, !strcmp(call, "nvmlDeviceGetPciInfo_v3"));
        return code ? code : fault(call, gpu);
    }
    return GPU_IS_LOST;
}

/* CALL for one about a device, whose recorded reading is `gpu` from then on. */
#define DEVICE_CALL(device)                                \
    CALL;                                                  \
    json *gpu = NULL;                                      \
    if ((code_ = find(device, __func__, &gpu))) return code_

static json *mig_of(nvmlDevice_t device, const json *gpu) {
    json *all = member(gpu, "mig");
    for (json *m = all ? all->first : NULL; m; m = m->next)
        if (!strcmp(member(m, "uuid")->text, device->mig)) return m;
    return NULL;
}

static nvmlReturn_t give_text(const char *text, char *out, unsigned length) {
    if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

static nvmlReturn_t give_member(const json *of, const char *key, char *out, unsigned length) {
    json *v = member(of, key);
    return v && v->kind == STRING ? give_text(v->text, out, length) : NOT_SUPPORTED;
}

static nvmlReturn_t give_number(const json *of, const char *key, unsigned *out) {
    json *v = member(of, key);
    if (!v) return NOT_SUPPORTED;
    *out = (unsigned)v->number;
    return OK;
}

/* Library */

static void journal(const char *what) {
    const char *path = getenv("FAKE_NVML_JOURNAL");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (fd >= 0) {
        dprintf(fd, "%s %d\n", what, (int)getpid());
        close(fd);
    }
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    CALL;
    (void)flags;
    const char *device = getenv("FAKE_NVML_DEVICE");
    if (!reading || sessions == 64) return UNKNOWN;
    session_fds[sessions++] = device ? open(device, O_RDONLY | O_CREAT | O_CLOEXEC, 0644) : -1;
    char words[WORDS][64];
    const char *at = control;
    while (directive(&at, "print", words)) { /* libraries do print, and to standard output */
        puts(words[0]);
        fflush(stdout);
    }
    journal("init");
    return OK;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT nvmlReturn_t nvmlShutdown(void) {
    CALL;
    if (session_fds[--sessions] >= 0) close(session_fds[sessions]);
    journal("shutdown");
    return OK;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code) {
    static char text[32];
    snprintf(text, sizeof text, "Fake error %d", code);
    return text;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    CALL;
    char words[WORDS][64];
    const char *at = control;
    if (directive(&at, "driver", words) > 0) return give_text(words[0], version, length);
    return give_member(reading, "driver", version, length);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    CALL;
    return give_member(reading, "nvml", version, length);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    CALL;
    return give_number(reading, "cuda", (unsigned *)version);
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    CALL;
    for (*count = 0; gpu_at(*count); ++*count) continue;
    return OK;
}

/* Handles */

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    CALL;
    json *gpu = gpu_at(index);
    if (!gpu) return INVALID_ARGUMENT;
    if (!member(gpu, "bus_id") && !member(gpu, "error")) return UNKNOWN; /* not a valid nvml.json */
    if ((code_ = silence(gpu, 1)) || (code_ = fault(__func__, gpu))) return code_;
    *device = handle_of(member(gpu, "bus_id")->text, "");
    return OK;
}

static nvmlReturn_t by_member(const char *call, const char *key, const char *text,
                              nvmlDevice_t *device) {
    for (json *gpu = gpus(); gpu; gpu = gpu->next) {
        json *v = member(gpu, key);
        if (!v || removed(gpu) || strcasecmp(v->text, text)) continue;
        nvmlReturn_t code = silence(gpu, 1);
        if (code || (code = fault(call, gpu))) return code;
        *device = handle_of(member(gpu, "bus_id")->text, "");
        return OK;
    }
    return NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    CALL;
    unsigned domain, bus, slot, function;
    char full[64];
    if (sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4) return INVALID_ARGUMENT;
    snprintf(full, sizeof full, "%08X:%02X:%02X.%X", domain, bus, slot, function);
    return by_member(__func__, "bus_id", full, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    CALL;
    return by_member(__func__, "uuid", uuid, device);
}

/* What a GPU is */

static void pci_info(const char *bus_id, nvmlPciInfo_t *pci) {
    memset(pci, 0, sizeof *pci);
    sscanf(bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->busId, sizeof pci->busId, "%s", bus_id);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFF,
             pci->bus & 0xFF, pci->device & 0xFF); /* the old field has room for 16 bits only */
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    DEVICE_CALL(device);
    pci_info(member(gpu, "bus_id")->text, pci);
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    DEVICE_CALL(device);
    if (device->mig[0] && !mig_of(device, gpu)) return NOT_FOUND;
    return give_member(device->mig[0] ? mig_of(device, gpu) : gpu, "uuid", uuid, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    DEVICE_CALL(device);
    if (!device->mig[0]) return give_member(gpu, "name", name, length);
    json *profile = member(mig_of(device, gpu), "name"), *product = member(gpu, "name");
    char text[256];
    if (!profile) return NOT_SUPPORTED;
    snprintf(text, sizeof text, "%s MIG %s", product ? product->text : "NVIDIA", profile->text);
    return give_text(text, name, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned length) {
    DEVICE_CALL(device);
    return give_member(gpu, "serial", serial, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor) {
    DEVICE_CALL(device);
    return give_number(gpu, "minor", minor);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    DEVICE_CALL(device);
    for (*index = 0; gpu_at(*index) != gpu; ++*index) continue;
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetModuleId(nvmlDevice_t device, unsigned *module) {
    DEVICE_CALL(device);
    return give_number(gpu, "module", module);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    DEVICE_CALL(device);
    json *total = member(gpu, "memory_bytes");
    if (!total) return NOT_SUPPORTED;
    *memory = (nvmlMemory_t){(unsigned long long)total->number, (unsigned long long)total->number, 0};
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *celsius) {
    DEVICE_CALL(device);
    return sensor ? INVALID_ARGUMENT : give_number(gpu, "temperature_c", celsius);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    DEVICE_CALL(device);
    json *v = member(gpu, "clock_events");
    if (!v) return NOT_SUPPORTED;
    *reasons = (unsigned long long)v->number;
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *t) {
    DEVICE_CALL(device);
    if (t->version != 0x100000C) return VERSION_MISMATCH;
    return give_number(gpu, "temperature_c", (unsigned *)&t->temperature);
}

/* Where it is */

static nvmlReturn_t give_words(const json *gpu, const char *key, unsigned count,
                               unsigned long *words) {
    json *v = member(gpu, key);
    if (!v) return NOT_SUPPORTED;
    if (item(v, (int)count)) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < count; i++) words[i] = item(v, (int)i) ? (unsigned long)item(v, (int)i)->number : 0;
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned count,
                                                unsigned long *nodes, unsigned scope) {
    DEVICE_CALL(device);
    return scope > 1 ? INVALID_ARGUMENT : give_words(gpu, "memory_affinity", count, nodes);
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned count,
                                             unsigned long *cpus) {
    DEVICE_CALL(device);
    return give_words(gpu, "cpu_affinity", count, cpus);
}

EXPORT nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned *node) {
    DEVICE_CALL(device);
    return give_number(gpu, "numa_node", node);
}

/* A row of `levels` or `p2p` about two GPUs of the file, in this order. */
static json *pair_row(const char *key, const json *one, const json *other) {
    json *all = member(reading, key);
    for (json *row = all ? all->first : NULL; row; row = row->next)
        if (item(row, 0)->number == number(one, "index", -1) &&
            item(row, 1)->number == number(other, "index", -1))
            return row;
    return NULL;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other,
                                                        unsigned *level) {
    DEVICE_CALL(one);
    json *second = NULL;
    if ((code_ = find(other, __func__, &second))) return code_;
    json *row = pair_row("levels", gpu, second);
    if (!row) row = pair_row("levels", second, gpu);
    if (!row) return NOT_SUPPORTED;
    *level = (unsigned)item(row, 2)->number;
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t other, unsigned index,
                                           unsigned *status) {
    DEVICE_CALL(one);
    json *second = NULL;
    if ((code_ = find(other, __func__, &second))) return code_;
    json *row = pair_row("p2p", gpu, second);
    if (!row || (index != 0 && index != 2)) return index > 4 ? INVALID_ARGUMENT : NOT_SUPPORTED;
    *status = (unsigned)item(row, index ? 3 : 2)->number;
    return OK;
}

/* NVLink */

static json *link_of(const json *gpu, unsigned link) {
    json *all = member(gpu, "links");
    for (json *l = all ? all->first : NULL; l; l = l->next)
        if (number(l, "link", -1) == (long long)link) return l;
    return NULL;
}

/* Beyond the last link the argument is wrong; a GPU without any does not know the question. */
static nvmlReturn_t no_link(const json *gpu) {
    json *all = member(gpu, "links");
    return all && all->first ? INVALID_ARGUMENT : NOT_SUPPORTED;
}

static int link_active(const json *gpu, const json *link) {
    char words[WORDS][64];
    const char *at = control;
    int active = (int)number(link, "active", 0);
    while (directive(&at, "link", words))
        if (names(words[0], gpu) &&
            (!strcmp(words[1], "*") || atoll(words[1]) == number(link, "link", -1)))
            active = !strcmp(words[2], "up");
    return active;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active) {
    DEVICE_CALL(device);
    json *l = link_of(gpu, link);
    if (!l) return no_link(gpu);
    *active = (unsigned)link_active(gpu, l);
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned link, unsigned *version) {
    DEVICE_CALL(device);
    json *l = link_of(gpu, link);
    return l ? give_number(l, "version", version) : no_link(gpu);
}

/* TRUE for each index that the library knows at all, as on B200: no evidence of a link. */
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned link,
                                                  unsigned capability, unsigned *has) {
    DEVICE_CALL(device);
    json *all = member(gpu, "links");
    if (!all || !all->first) return NOT_SUPPORTED;
    if (link >= 36 || capability > 5) return INVALID_ARGUMENT;
    *has = 1;
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link,
                                                        nvmlPciInfo_t *pci) {
    DEVICE_CALL(device);
    json *l = link_of(gpu, link);
    if (!l) return no_link(gpu);
    json *remote = member(l, "remote_bus_id");
    if (!remote) return NOT_SUPPORTED;
    pci_info(remote->text, pci);
    pci->pciSubSystemId = 0xDEADBEEF; /* NVML leaves it undefined here */
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link,
                                                        unsigned *type) {
    DEVICE_CALL(device);
    json *l = link_of(gpu, link);
    return l ? give_number(l, "remote_type", type) : no_link(gpu);
}

/* All recorded errors of a link count as replays, none as one of the other four kinds. */
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link,
                                                    unsigned counter, unsigned long long *count) {
    DEVICE_CALL(device);
    json *l = link_of(gpu, link);
    if (!l) return no_link(gpu);
    json *errors = member(l, "errors");
    if (!errors) return NOT_SUPPORTED;
    if (counter > 4) return INVALID_ARGUMENT;
    *count = counter ? 0 : (unsigned long long)errors->number;
    return OK;
}

static nvmlReturn_t field(const json *gpu, nvmlFieldValue_t *v) {
    char words[WORDS][64];
    json *links = member(gpu, "links"), *l = link_of(gpu, v->scopeId);
    v->valueType = 1; /* unsigned int */
    v->value.ullVal = 0;
    switch (v->fieldId) {
    case 91: /* NVLINK_LINK_COUNT */
        if (!links || !links->first) return NOT_SUPPORTED;
        for (json *i = links->first; i; i = i->next) v->value.uiVal++;
        return OK;
    case 164: /* NVLINK_GET_SPEED */
        return l ? give_number(l, "speed_mbps", &v->value.uiVal) : no_link(gpu);
    case 165: /* NVLINK_GET_STATE, which drivers without field 164 do not have either */
        if (!l || !member(l, "speed_mbps")) return l ? NOT_SUPPORTED : no_link(gpu);
        v->value.uiVal = (unsigned)link_active(gpu, l);
        return OK;
    case 166: /* NVLINK_GET_VERSION */
        if (!l || !member(l, "speed_mbps")) return l ? NOT_SUPPORTED : no_link(gpu);
        return give_number(l, "version", &v->value.uiVal);
    case 161: /* NVLINK_ERROR_DL_REPLAY; as the counters, which see */
        if (!l || !member(l, "speed_mbps")) return l ? NOT_SUPPORTED : no_link(gpu);
        return give_number(l, "errors", &v->value.uiVal);
    case 162: /* NVLINK_ERROR_DL_RECOVERY */
    case 163: /* NVLINK_ERROR_DL_CRC */
        return l && member(l, "errors") && member(l, "speed_mbps") ? OK : NOT_SUPPORTED;
    case 230: /* GET_GPU_RECOVERY_ACTION */
        if (about(gpu, "recovery", words)) {
            v->value.uiVal = (unsigned)atoi(words[0]);
            return OK;
        }
        return give_number(gpu, "recovery_action", &v->value.uiVal);
    default:
        return NOT_SUPPORTED;
    }
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count,
                                             nvmlFieldValue_t *values) {
    DEVICE_CALL(device);
    for (int i = 0; i < count; i++) values[i].nvmlReturn = field(gpu, &values[i]);
    return OK;
}

/* Fabric. A recorded reading without health fields comes from a driver without that structure. */

static nvmlReturn_t fabric(const json *gpu, unsigned char cluster[16], nvmlReturn_t *status,
                           unsigned *clique, unsigned char *state) {
    char words[WORDS][64];
    json *f = member(gpu, "fabric"), *uuid = member(f, "cluster");
    int said = about(gpu, "fabric", words);
    if (!f && !said) return NOT_SUPPORTED;
    memset(cluster, 0, 16);
    int digits = 0;
    for (const char *s = uuid ? uuid->text : ""; *s && digits < 32; s++)
        if (isxdigit((unsigned char)*s)) {
            int value = isdigit((unsigned char)*s) ? *s - '0' : tolower((unsigned char)*s) - 'a' + 10;
            cluster[digits / 2] = (unsigned char)(cluster[digits / 2] << 4 | value);
            digits++;
        }
    *clique = (unsigned)number(f, "clique", 0);
    memset(state, 0xAA, 4);
    *state = (unsigned char)(said ? atoi(words[0]) : number(f, "state", 0));
    *status = (nvmlReturn_t)(said && words[1][0] ? atoi(words[1]) : number(f, "status", 0));
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
    DEVICE_CALL(device);
    return fabric(gpu, info->clusterUuid, &info->status, &info->cliqueId, &info->state);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v3_t *info) {
    DEVICE_CALL(device);
    json *f = member(gpu, "fabric"), *mask = member(f, "health_mask"),
         *summary = member(f, "health_summary");
    if (!f) return NOT_SUPPORTED;
    if (!(info->version == 0x3000028 && summary) && !(info->version == 0x2000024 && mask))
        return VERSION_MISMATCH;
    if (info->version == 0x3000028) info->healthSummary = (unsigned char)summary->number;
    info->healthMask = mask ? (unsigned)mask->number : 0;
    return fabric(gpu, info->clusterUuid, &info->status, &info->cliqueId, &info->state);
}

/* MIG */

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    DEVICE_CALL(device);
    char words[WORDS][64];
    json *mode = member(gpu, "mig_mode");
    if (!mode) return NOT_SUPPORTED;
    int said = about(gpu, "mig", words);
    *current = (unsigned)(said ? atoi(words[0]) : item(mode, 0)->number);
    *pending = (unsigned)(said ? atoi(words[1]) : item(mode, 1)->number);
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    DEVICE_CALL(device);
    return give_number(gpu, "mig_max", count);
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index,
                                                        nvmlDevice_t *mig) {
    DEVICE_CALL(device);
    char words[WORDS][64];
    const char *at = control;
    if (index >= (unsigned)number(gpu, "mig_max", 0)) return INVALID_ARGUMENT;
    while (directive(&at, "mig-gone", words))
        if (names(words[0], gpu) && (unsigned)atoi(words[1]) == index) return NOT_FOUND;
    json *all = member(gpu, "mig");
    for (json *m = all ? all->first : NULL; m; m = m->next)
        if (number(m, "index", -1) == (long long)index) {
            *mig = handle_of(member(gpu, "bus_id")->text, member(m, "uuid")->text);
            return OK;
        }
    return NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is) {
    DEVICE_CALL(device);
    *is = device->mig[0] != 0;
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig,
                                                                 nvmlDevice_t *device) {
    DEVICE_CALL(mig);
    if (!mig->mig[0]) return INVALID_ARGUMENT;
    *device = handle_of(mig->bus_id, "");
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
    DEVICE_CALL(device);
    return give_number(mig_of(device, gpu), "gpu_instance", id);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) {
    DEVICE_CALL(device);
    return give_number(mig_of(device, gpu), "compute_instance", id);
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *a) {
    DEVICE_CALL(device);
    json *m = mig_of(device, gpu);
    if (!m) return NOT_SUPPORTED;
    memset(a, 0, sizeof *a);
    a->gpuInstanceSliceCount = (unsigned)number(m, "gpu_slices", 0);
    a->computeInstanceSliceCount = (unsigned)number(m, "compute_slices", 0);
    a->memorySizeMB = (unsigned long long)number(m, "memory_mib", 0);
    return OK;
}

/* Health */

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter,
                                                unsigned long long *count) {
    DEVICE_CALL(device);
    char words[WORDS][64];
    json *v = member(gpu, "ecc_uncorrected");
    if (!v || type != 1 || counter != 0) return NOT_SUPPORTED;
    *count = (unsigned long long)(about(gpu, "ecc", words) ? atoll(words[0]) : v->number);
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable,
                                              unsigned *uncorrectable, unsigned *pending,
                                              unsigned *failed) {
    DEVICE_CALL(device);
    char words[WORDS][64];
    json *v = member(gpu, "remap");
    unsigned *out[] = {correctable, uncorrectable, pending, failed};
    int said = about(gpu, "remap", words);
    if (!v && !said) return NOT_SUPPORTED;
    for (int i = 0; i < 4; i++) *out[i] = (unsigned)(said ? atoi(words[i]) : item(v, i)->number);
    return OK;
}

/* Events. A set gives those that were written to the control file after it was made. */

static long last_event(void) {
    char words[WORDS][64];
    const char *at = control;
    long last = 0;
    while (directive(&at, "event", words))
        if (atol(words[0]) > last) last = atol(words[0]);
    return last;
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    CALL;
    look(); /* what happened while the call hung is not heard either */
    *set = calloc(1, sizeof **set);
    (*set)->last = last_event();
    return OK;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    CALL;
    while (set->registered) {
        registration *next = set->registered->next;
        free(set->registered);
        set->registered = next;
    }
    free(set);
    return OK;
}

#define EVENT_TYPES 0xFF9FULL

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    DEVICE_CALL(device);
    char words[WORDS][64];
    *types = about(gpu, "events", words) ? strtoull(words[0], NULL, 0) : EVENT_TYPES;
    return OK;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                             nvmlEventSet_t set) {
    DEVICE_CALL(device);
    char words[WORDS][64];
    unsigned long long supported =
        about(gpu, "events", words) ? strtoull(words[0], NULL, 0) : EVENT_TYPES;
    if (types & ~supported) return NOT_SUPPORTED;
    registration *r = calloc(1, sizeof *r);
    *r = (registration){device, types, set->registered};
    set->registered = r;
    return OK;
}

/* Takes the first event after the set's last that someone registered for; 1 if there was one. */
static int take_event(nvmlEventSet_t set, nvmlEventData_t *data) {
    char words[WORDS][64];
    const char *at = control;
    while (directive(&at, "event", words)) {
        if (atol(words[0]) <= set->last) continue;
        set->last = atol(words[0]);
        unsigned long long type = strtoull(words[2], NULL, 0);
        for (json *gpu = gpus(); gpu; gpu = gpu->next) {
            json *bus = member(gpu, "bus_id");
            if (!bus || !names(words[1], gpu)) continue;
            for (registration *r = set->registered; r; r = r->next)
                if (!strcasecmp(r->device->bus_id, bus->text) && (r->types & type)) {
                    *data = (nvmlEventData_t){
                        r->device, type, strtoull(words[3], NULL, 0),
                        words[4][0] ? (unsigned)strtoul(words[4], NULL, 0) : 0xFFFFFFFFu,
                        words[5][0] ? (unsigned)strtoul(words[5], NULL, 0) : 0xFFFFFFFFu};
                    return 1;
                }
        }
    }
    return 0;
}

static long long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (long long)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms) {
    CALL;
    const long long until = now_ms() + timeout_ms;
    char folder[4096] = "";
    snprintf(folder, sizeof folder, "%s", getenv(control_file.variable) ? getenv(control_file.variable) : "");
    char *slash = strrchr(folder, '/');
    if (slash) *slash = 0;
    int changes = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (slash) inotify_add_watch(changes, folder, IN_CLOSE_WRITE | IN_MOVED_TO);
    nvmlReturn_t code = TIMEOUT;
    for (;;) {
        look();
        if ((code = fault(__func__, NULL))) break;
        if (take_event(set, data)) break;
        long long left = until - now_ms();
        code = TIMEOUT;
        if (left <= 0) break;
        pthread_mutex_unlock(&lock);
        struct pollfd p = {changes, POLLIN, 0};
        poll(&p, 1, (int)left);
        char drained[4096];
        while (read(changes, drained, sizeof drained) > 0) continue;
        pthread_mutex_lock(&lock);
    }
    close(changes);
    return code;
}
