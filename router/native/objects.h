/* What is used of Python's stable ABI, declared here so that its headers need not be installed. */

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

_Static_assert(sizeof(unsigned long) == 8, "numbers of Python are read as unsigned long");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "names and tokens lie little end first");

typedef struct _object Object;

extern ssize_t PyTuple_Size(Object *);
extern Object *PyTuple_GetItem(Object *, ssize_t);
extern unsigned long PyLong_AsUnsignedLong(Object *);
extern Object *PyLong_FromLong(long);
extern int PyDict_SetItem(Object *, Object *, Object *);
extern void Py_DecRef(Object *);
extern Object *PyErr_Occurred(void);
extern Object *PyErr_NoMemory(void);
extern void PyErr_SetString(Object *, const char *);
extern Object *PyExc_OverflowError;

#define EXPORT __attribute__((visibility("default")))

/* Numbers of a tuple from `start` on. -1, and Python's error is set: one is no number of 64 bits. */
static int read_names(Object *tuple, ssize_t start, ssize_t count, uint64_t *out) {
    for (ssize_t i = 0; i < count; i++) {
        Object *item = PyTuple_GetItem(tuple, start + i);
        if (!item) return -1;
        out[i] = PyLong_AsUnsignedLong(item);
        if (out[i] == UINT64_MAX && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* The same of 32 bits. */
static int read_tokens(Object *tuple, ssize_t start, ssize_t count, uint32_t *out) {
    for (ssize_t i = 0; i < count; i++) {
        Object *item = PyTuple_GetItem(tuple, start + i);
        if (!item) return -1;
        unsigned long token = PyLong_AsUnsignedLong(item);
        if (token > UINT32_MAX) {
            if (token != UINT64_MAX || !PyErr_Occurred())
                PyErr_SetString(PyExc_OverflowError, "a token is no number of 32 bits");
            return -1;
        }
        out[i] = (uint32_t)token;
    }
    return 0;
}
