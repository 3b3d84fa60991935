import { connect, type Socket } from "node:net";

/** Opens each stream on its own socket and waits until each has received its first event. */
export async function openStreams(url: string, count: number) {
  const { hostname, port } = new URL(url);
  const body = JSON.stringify({ model: "m", prompt: "hold", max_tokens: 1000, stream: true });
  const head =
    `POST /v1/completions HTTP/1.1\r\nhost: ${hostname}\r\ncontent-type: application/json\r\n` +
    `content-length: ${body.length}\r\n\r\n`;
  const ends: Promise<boolean>[] = [];
  const sockets: Socket[] = [];

  function open(): Promise<void> {
    return new Promise((resolve, reject) => {
      const socket = connect(Number(port), hostname, () => socket.write(head + body));
      let tail = "";
      sockets.push(socket);
      ends.push(
        new Promise((ended) => {
          socket.on("data", (chunk: Buffer) => {
            tail = (tail + chunk.toString("latin1")).slice(-256);
            if (tail.includes("data: {")) resolve();
            // The last chunk of a chunked body.
            if (tail.endsWith("0\r\n\r\n")) {
              ended(tail.includes("data: [DONE]"));
              socket.destroy();
            }
          });
          socket.on("close", () => {
            ended(false);
            // No effect after the first event.
            reject(new Error(`a stream ended before its first event: ${tail}`));
          });
          socket.on("error", reject);
        }),
      );
    });
  }

  for (let opened = 0; opened < count; opened += 200) {
    await Promise.all(Array.from({ length: Math.min(200, count - opened) }, open));
  }
  return {
    async ended(): Promise<number> {
      return (await Promise.all(ends)).filter(Boolean).length;
    },
  };
}
