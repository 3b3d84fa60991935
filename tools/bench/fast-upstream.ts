// The servers of proxy-upstream.ts, with their HTTP in C (c/http-answers.c), whose answers are made
// before: beside a router they take little of the processor and never pause. Argument: their cores.
// Prints {"prefill": port, "decode": port, "sideChannel": port}. The stream of the prompt "hold"
// stays open after its first event until "release\n" arrives on stdin.
import { rmSync } from "node:fs";
import { dirname } from "node:path";
import { startSideChannel } from "@kv/testing/http/side-channel";
import { compileC, firstLine, startOnCores } from "./child-processes.js";
import {
  DONE,
  EVENT,
  MODELS,
  prefillAnswer,
  publishEvents,
  RENDERED,
  STREAM,
} from "./upstream-answers.js";

const STREAM_HEAD =
  "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
const LAST_CHUNK = "0\r\n\r\n";
const chunk = (text: string) => `${Buffer.byteLength(text).toString(16)}\r\n${text}\r\n`;
const json = (body: string) =>
  `HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`;

const [cores = "0"] = process.argv.slice(2);
const engineId = `engine-${process.pid}`;
const about = () => ({ engineId, vllmVersion: "0.33.0" });
const { port: sideChannel } = await startSideChannel(about, 0);
const engine = async () => ({
  "/kv_event_sources": json(await publishEvents()),
  "/render": json(RENDERED),
  "/health": json(""),
  "/v1/models": json(MODELS),
});
/** Of each server, by the end of a request's path. */
const answers = [
  { ...(await engine()), "/v1/completions": json(prefillAnswer(engineId, sideChannel)) },
  {
    ...(await engine()),
    "/v1/completions": `${STREAM_HEAD}${chunk(STREAM)}${LAST_CHUNK}`,
    "#hold": `${STREAM_HEAD}${chunk(EVENT)}`,
    "#release": `${chunk(DONE)}${LAST_CHUNK}`,
  },
];
const program = await compileC("http-answers");
const child = startOnCores(cores, program, [String(answers.length)]);
for (const [server, texts] of answers.entries())
  for (const [suffix, text] of Object.entries(texts))
    child.stdin.write(`answer ${server} ${suffix} ${Buffer.byteLength(text)}\n${text}`);
child.stdin.write("listen\n");
const [prefill, decode] = (await firstLine(child)).split(" ").map(Number);
rmSync(dirname(program), { recursive: true });
process.stdout.write(`${JSON.stringify({ prefill, decode, sideChannel })}\n`);
process.stdin.pipe(child.stdin);
process.stdin.on("end", () => process.exit(0));
