import { type AddressInfo, connect, createServer, type Socket } from "node:net";
import type { Clock } from "@kv/interface";

/** The way of a message between two processes: how long it takes from the write to the read, its handling included. */
export interface MessageDelay {
  /** Returns the delay of a message that is sent now. */
  nextMs(): number;
}

/** A TCP relay to a server of this process that delays every chunk on the given clock. */
export interface DelayedLink {
  readonly url: string;
  close(): Promise<void>;
}

export async function delayedLink(
  targetUrl: string,
  clock: Clock,
  delay: MessageDelay,
): Promise<DelayedLink> {
  const { hostname, port } = new URL(targetUrl);
  const sockets = new Set<Socket>();
  const forward = (from: Socket, to: Socket) => {
    sockets.add(from);
    from.setNoDelay(true);
    const later = (run: () => void) => void clock.setTimer(run, delay.nextMs(), { ref: true });
    from.on("data", (chunk) => later(() => void (to.destroyed || to.write(chunk))));
    from.on("end", () => later(() => void to.end()));
    from.on("error", () => to.destroy());
    from.on("close", () => sockets.delete(from));
  };
  const server = createServer({ allowHalfOpen: true }, (client) => {
    const upstream = connect({ host: hostname, port: Number(port), allowHalfOpen: true });
    forward(client, upstream);
    forward(upstream, client);
  });
  await new Promise<void>((resolve) => void server.listen(0, "127.0.0.1", resolve));
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    close: () =>
      new Promise((resolve) => {
        for (const socket of sockets) socket.destroy();
        server.close(() => resolve());
      }),
  };
}

/** Messages that take `hopMs` each, and before that `handlingMs` on one of `cores`, in the order in which they are sent. */
export function messageDelay(
  clock: Clock,
  {
    hopMs,
    handlingMs = 0,
    cores = 1,
  }: {
    readonly hopMs: number;
    readonly handlingMs?: number | undefined;
    readonly cores?: number | undefined;
  },
): MessageDelay {
  const busyUntilMs = Array.from({ length: cores }, () => 0);
  return {
    nextMs() {
      if (handlingMs === 0) return hopMs;
      const nowMs = clock.now();
      const core = busyUntilMs.indexOf(Math.min(...busyUntilMs));
      const endMs = Math.max(nowMs, busyUntilMs[core] ?? 0) + handlingMs;
      busyUntilMs[core] = endMs;
      return endMs - nowMs + hopMs;
    },
  };
}
