// Sends an honest request to the proxy at argv[2] every 20 ms, each on a connection of its own, from another address than the attacker's.
// Prints "ready" after 20 of them, and at the end of stdin {"right", "wrong", "longestMs"}.
import { request } from "node:http";
import { setTimeout as sleep } from "node:timers/promises";

const url = process.argv[2] ?? "";
const seen = { right: 0, wrong: 0, longestMs: 0 };
let running = true;
process.stdin.resume().on("end", () => {
  running = false;
});

function ask(): Promise<boolean> {
  return new Promise((resolve) => {
    const asked = request(`${url}/v1/completions`, {
      method: "POST",
      agent: false,
      localAddress: "127.0.0.9",
      headers: { "content-type": "application/json" },
      timeout: 60_000,
    });
    asked.on("error", () => resolve(false)).on("timeout", () => asked.destroy());
    asked.on("response", (response) => {
      let text = "";
      response.setEncoding("utf8").on("data", (chunk: string) => {
        text += chunk;
      });
      response.on("end", () => resolve(response.statusCode === 200 && text.includes("right")));
      response.on("error", () => resolve(false));
    });
    asked.end('{"prompt":"honest","max_tokens":1}');
  });
}

for (let at = 0; at < 20; at += 1) await ask();
process.stdout.write("ready\n");
while (running) {
  const startedAt = performance.now();
  if (await ask()) seen.right += 1;
  else seen.wrong += 1;
  seen.longestMs = Math.max(seen.longestMs, Math.round(performance.now() - startedAt));
  await sleep(20);
}
process.stdout.write(`${JSON.stringify(seen)}\n`);
