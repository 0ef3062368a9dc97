/* A library that contains a system call. */
long call(long number, long first, long second, long third) {
    register long fourth asm("r10") = 0;
    long answer;
    asm volatile("syscall" : "=a"(answer) : "a"(number), "D"(first), "S"(second), "d"(third), "r"(fourth) : "rcx", "r11", "memory");
    return answer;
}
