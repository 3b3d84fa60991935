// The servers of proxy-upstream.ts, with their HTTP in C (c/http-answers.c): beside a router they
// take little of the processor and never pause. Argument: their core. Prints {"prefill": port,
// "decode": port, "sideChannel": port}. The stream of the prompt "hold" stays open after its first
// event until "release\n" arrives on stdin.
import { startSideChannel } from "@kv/testing/http/side-channel";
import { chunk, jsonAnswer, LAST_CHUNK, STREAM_HEAD, startHttpAnswers } from "./http-answers.js";
import {
  DONE,
  EVENT,
  MODELS,
  prefillAnswer,
  publishEvents,
  RENDERED,
  STREAM,
} from "./upstream-answers.js";

const [core = "0"] = process.argv.slice(2);
const engineId = `engine-${process.pid}`;
const { port: sideChannel } = await startSideChannel(
  () => ({ engineId, vllmVersion: "0.33.0" }),
  0,
);
const engine = async () => ({
  "/kv_event_sources": jsonAnswer(await publishEvents()),
  "/render": jsonAnswer(RENDERED),
  "/health": jsonAnswer(""),
  "/v1/models": jsonAnswer(MODELS),
});
const { child, ports } = await startHttpAnswers(core, [
  { ...(await engine()), "/v1/completions": jsonAnswer(prefillAnswer(engineId, sideChannel)) },
  {
    ...(await engine()),
    "/v1/completions": `${STREAM_HEAD}${chunk(STREAM)}${LAST_CHUNK}`,
    "#hold": `${STREAM_HEAD}${chunk(EVENT)}`,
    "#release": `${chunk(DONE)}${LAST_CHUNK}`,
  },
]);
const [prefill, decode] = ports;
process.stdout.write(`${JSON.stringify({ prefill, decode, sideChannel })}\n`);
if (child.stdin !== null) process.stdin.pipe(child.stdin);
process.stdin.on("end", () => process.exit(0));
