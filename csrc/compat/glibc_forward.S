/* SPDX-License-Identifier: Apache-2.0 */
/* Lets a wheel run with glibc 2.28 and later, even if it was built with a newer glibc. glibc 2.29 to 2.34 gave some
 * functions new symbol versions. The linker's --wrap option redirects calls of farandole and libstdc++ to the old
 * versions. CMake reads the list of functions from this file; tests/single/test_layout.py checks the library. */

#if defined(__x86_64__)
#define FIRST_VERSION GLIBC_2.2.5
#define SETNAME_VERSION GLIBC_2.12
#define JUMP(function) jmp function@PLT
#elif defined(__aarch64__)
#define FIRST_VERSION GLIBC_2.17
#define SETNAME_VERSION GLIBC_2.17
#define JUMP(function) b function
#endif

#define FORWARD(name) FORWARD_TO(name, FIRST_VERSION)
#define FORWARD_TO(name, version)            \
  .symver old_##name, name@version;          \
  .globl __wrap_##name;                      \
  .hidden __wrap_##name;                     \
  .type __wrap_##name, %function;            \
  __wrap_##name: JUMP(old_##name);           \
  .size __wrap_##name, . - __wrap_##name;

  .text
FORWARD(__pthread_key_create)
FORWARD(dladdr)
FORWARD(dlclose)
FORWARD(dlerror)
FORWARD(dlopen)
FORWARD(dlsym)
FORWARD(pthread_attr_setstacksize)
FORWARD(pthread_create)
FORWARD(pthread_detach)
FORWARD(pthread_getspecific)
FORWARD(pthread_join)
FORWARD(pthread_key_create)
FORWARD(pthread_key_delete)
FORWARD(pthread_kill)
FORWARD(pthread_mutex_trylock)
FORWARD(pthread_once)
FORWARD(pthread_rwlock_rdlock)
FORWARD(pthread_rwlock_unlock)
FORWARD(pthread_rwlock_wrlock)
FORWARD_TO(pthread_setname_np, SETNAME_VERSION)
FORWARD(pthread_setspecific)
FORWARD(pthread_sigmask)
FORWARD(sem_destroy)
FORWARD(sem_init)
FORWARD(sem_post)
FORWARD(sem_wait)

  .section .note.GNU-stack, "", %progbits
