/* A process that holds a tether and does nothing: the least that can be killed.
 *
 * light_worker PATH OFFER FD BYTES: connects to the tether at PATH, waits for the greeting, sends OFFER (hexadecimal),
 * with so much memory beside it unless that is 0, waits for the receipt, writes "+" to FD and sleeps. It ends with
 * whoever started it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* Make a sealed memory file; -1 if that fails. */
static int memory_of(long bytes) {
    int memory = memfd_create("lmlive-light", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (memory < 0 || ftruncate(memory, bytes) != 0)
        return -1;
    return fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0 ? -1 : memory;
}

/* Send a packet, with a descriptor beside it unless that is -1; 0 if it went. */
static int send_with(int sock, void *packet, size_t length, int memory) {
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } rights = {0};
    struct iovec content = {.iov_base = packet, .iov_len = length};
    struct msghdr message = {.msg_iov = &content, .msg_iovlen = 1};

    if (memory >= 0) {
        message.msg_control = &rights;
        message.msg_controllen = sizeof rights;
        rights.header.cmsg_level = SOL_SOCKET;
        rights.header.cmsg_type = SCM_RIGHTS;
        rights.header.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&rights.header), &memory, sizeof memory);
    }
    return sendmsg(sock, &message, 0) != (ssize_t)length;
}

int main(int argc, char **argv) {
    unsigned char packet[256];
    size_t length = 0;
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    if (argc != 5 || strlen(argv[1]) >= sizeof address.sun_path || strlen(argv[2]) / 2 > sizeof packet)
        return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    strcpy(address.sun_path, argv[1]);
    for (const char *digit = argv[2]; digit[0] && digit[1]; digit += 2) {
        unsigned int byte;
        if (sscanf(digit, "%2x", &byte) != 1)
            return 2;
        packet[length++] = (unsigned char)byte;
    }
    int memory = atol(argv[4]) ? memory_of(atol(argv[4])) : -1;
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (sock < 0 || connect(sock, (struct sockaddr *)&address, sizeof address) != 0)
        return 1;
    unsigned char answer[4096];
    if (recv(sock, answer, sizeof answer, 0) <= 0 || send_with(sock, packet, length, memory) != 0)
        return 1;
    /* A receipt is an array of one; an error is one of three. */
    if (recv(sock, answer, sizeof answer, 0) <= 0 || answer[0] != 0x91)
        return 1;
    if (write(atoi(argv[3]), "+", 1) != 1)
        return 1;
    close(atoi(argv[3]));
    for (;;)
        pause();
}
