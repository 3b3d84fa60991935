// The servers of proxy-upstream.ts, with their HTTP in C (c/http-answers.c): beside a router they take little of the processor and never pause.
// Prints {"prefill": port, "decode": port, "sideChannel": port}. The stream of the prompt "hold" stays open after its first event until "release\n"
// arrives on stdin.
import { spawn } from "node:child_process";
import { rmSync } from "node:fs";
import { dirname } from "node:path";
import { startSideChannel } from "../packages/proxy/test/support/side-channel.js";
import { compileC } from "./c-program.js";
import { firstLine } from "./child-processes.js";
import { DONE, EVENT, MODELS, prefillAnswer, publishEvents, RENDERED, STREAM } from "./upstream-answers.js";

const engineId = `engine-${process.pid}`;
const { port: sideChannel } = await startSideChannel(() => ({ engineId, vllmVersion: "0.33.0" }), 0);
const program = await compileC("http-answers");
const server = spawn(program, ["2"], { stdio: ["pipe", "pipe", "inherit"] });

const json = (body: string) =>
  `HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`;
const EVENTS_HEAD =
  "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
const chunk = (text: string) => `${text.length.toString(16)}\r\n${text}\r\n`;
const LAST_CHUNK = "0\r\n\r\n";

function answer(listener: number, suffix: string, text: string): void {
  server.stdin.write(`answer ${listener} ${suffix} ${Buffer.byteLength(text)}\n${text}`);
}
for (const listener of [0, 1]) {
  answer(listener, "/kv_event_sources", json(await publishEvents()));
  answer(listener, "/render", json(RENDERED));
  answer(listener, "/health", json(""));
  answer(listener, "/v1/models", json(MODELS));
}
answer(0, "/v1/completions", json(prefillAnswer(engineId, sideChannel)));
answer(1, "/v1/completions", `${EVENTS_HEAD}${chunk(STREAM)}${LAST_CHUNK}`);
answer(1, "#hold", `${EVENTS_HEAD}${chunk(EVENT)}`);
answer(1, "#release", `${chunk(DONE)}${LAST_CHUNK}`);
server.stdin.write("listen\n");
const [prefill, decode] = (await firstLine(server)).split(" ").map(Number);
rmSync(dirname(program), { recursive: true });
process.stdout.write(`${JSON.stringify({ prefill, decode, sideChannel })}\n`);
process.stdin.pipe(server.stdin);
process.stdin.on("end", () => process.exit(0));
