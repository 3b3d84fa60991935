import { type AddressInfo, connect, createServer, type Socket } from "node:net";
import type { Clock } from "@kv/interface";

/** What passes a link at once. */
export interface Message {
  readonly begins: "request" | "answer" | undefined;
  /** Tokens of an event stream in it. */
  readonly tokens: number;
}

export interface DelayedLinkOptions {
  readonly clock: Clock;
  /** From the write of a message to its read. */
  readonly hopMs: number;
  /** Does what a message costs its processes, before it leaves. Default: nothing. */
  readonly handle?: ((message: Message) => Promise<void>) | undefined;
}

/** A TCP relay to a server of this process that delays every chunk on the given clock. */
export interface DelayedLink {
  readonly url: string;
  /** Breaks the connections. New ones go to another server; undefined: to none. */
  cut(targetUrl: string | undefined): void;
  close(): Promise<void>;
}

export async function delayedLink(
  targetUrl: string,
  { clock, hopMs, handle }: DelayedLinkOptions,
): Promise<DelayedLink> {
  let target: string | undefined = targetUrl;
  const sockets = new Set<Socket>();
  const forward = (from: Socket, to: Socket) => {
    sockets.add(from);
    from.setNoDelay(true);
    const hop = (run: () => void) => void clock.setTimer(run, hopMs, { ref: true });
    let handled = Promise.resolve();
    const later = (message: Message | undefined, run: () => void) => {
      if (handle === undefined) return hop(run);
      handled = handled
        .then(() => (message === undefined ? undefined : handle(message)))
        .then(() => hop(run));
    };
    from.on("data", (chunk: Buffer) => {
      const text = chunk.toString("latin1");
      const begins = text.startsWith("POST ")
        ? "request"
        : text.startsWith("HTTP/1")
          ? "answer"
          : undefined;
      later({ begins, tokens: text.split("data: {").length - 1 }, () => {
        if (!to.destroyed) to.write(chunk);
      });
    });
    from.on("end", () => later(undefined, () => void to.end()));
    from.on("error", () => to.destroy());
    from.on("close", () => sockets.delete(from));
  };
  const server = createServer({ allowHalfOpen: true }, (client) => {
    if (target === undefined) return void client.destroy();
    const { hostname, port } = new URL(target);
    const upstream = connect({ host: hostname, port: Number(port), allowHalfOpen: true });
    forward(client, upstream);
    forward(upstream, client);
  });
  await new Promise<void>((resolve) => void server.listen(0, "127.0.0.1", resolve));
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    cut(url) {
      target = url;
      for (const socket of sockets) socket.destroy();
    },
    close: () =>
      new Promise((resolve) => {
        for (const socket of sockets) socket.destroy();
        server.close(() => resolve());
      }),
  };
}
