/* A process that holds a tether and does nothing: the least that can be killed.
 *
 * light_worker PATH OFFER FD: connects to the tether at PATH, waits for the greeting, sends OFFER (hexadecimal), waits
 * for the receipt, writes "+" to FD and sleeps. It ends with whoever started it.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int main(int argc, char **argv) {
    unsigned char packet[256];
    size_t length = 0;
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    if (argc != 4 || strlen(argv[1]) >= sizeof address.sun_path || strlen(argv[2]) / 2 > sizeof packet)
        return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    strcpy(address.sun_path, argv[1]);
    for (const char *digit = argv[2]; digit[0] && digit[1]; digit += 2) {
        unsigned int byte;
        if (sscanf(digit, "%2x", &byte) != 1)
            return 2;
        packet[length++] = (unsigned char)byte;
    }
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (sock < 0 || connect(sock, (struct sockaddr *)&address, sizeof address) != 0)
        return 1;
    unsigned char answer[4096];
    if (recv(sock, answer, sizeof answer, 0) <= 0 || send(sock, packet, length, 0) != (ssize_t)length)
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
