import { VLLM_VERSIONS } from "@kv/protocol";
import type { WireDifference, WireReport } from "./compare-wire.js";

const MAX_LINES = 100;
const MAX_LENGTH = 200;

export function wireText(report: WireReport): string {
  const { vllm, connectorVersion, comparedWith, differences, requestsCompared } = report;
  const { version, support } = comparedWith;
  const subject = `vLLM ${shortened(vllm ?? "of unknown version")}, connector version ${connectorVersion ?? "not found"}`;
  if (differences.length === 0) {
    const tested = VLLM_VERSIONS.filter((each) => each.support === "transfers").map(
      (each) => each.version,
    );
    const note =
      support === "transfers"
        ? ""
        : `; its handshake is read, transfers are tested with ${tested.join(", ")}`;
    const requests = requestsCompared ? "" : "; clients' requests were not compared";
    return `${subject}\n\nok: the wire is that of ${version}${note}${requests}\n`;
  }
  const width = Math.max(...differences.map(({ section }) => section.length));
  const lines = differences.slice(0, MAX_LINES).flatMap((difference) => {
    const { change, section } = difference;
    const line = `${change.padEnd(7)}  ${section.padEnd(width)}  ${describe(difference)}`;
    return [line, `         means: ${consequence(difference)}`];
  });
  const more =
    differences.length > MAX_LINES ? [`… and ${differences.length - MAX_LINES} more`] : [];
  const count = `${differences.length} ${differences.length === 1 ? "difference" : "differences"}`;
  return [
    `${subject}, compared with ${version}`,
    "",
    ...lines,
    ...more,
    "",
    `differs: ${count} from ${version}`,
    "",
  ].join("\n");
}

function describe({ name, change, before, after }: WireDifference): string {
  const form = (text: string | undefined) => (text ? ` (${shortened(text)})` : "");
  if (change === "added") return `${shortened(name)}${form(after)}`;
  if (change === "removed") return `${shortened(name)}${form(before)}`;
  if (change === "renamed") return `${shortened(name)} is now ${shortened(after ?? "")}`;
  if (change === "missing") return `${shortened(name)} not found in the sources`;
  return `${shortened(name)} is ${shortened(after ?? "")}, was ${shortened(before ?? "")}`;
}

const CONSEQUENCES: Readonly<Record<string, string>> = {
  connector:
    "its compatibility hash equals that of no other version: P and D must run this version together",
  handshake: "peers of other versions may not understand its handshake",
  "handshake payload": "peers of other versions refuse its handshake",
  "cache layouts": "a peer that does not know the name of the layout refuses the handshake",
  "hash function": "the same factors have another hash: peers of other versions refuse each other",
  "compatibility hash":
    "the hash cannot be computed or searched from the factors of other versions",
  notifications: "P may not extend the leases of other versions' requests",
  "pull notifications":
    "P may count readers otherwise: blocks stay until the lease ends, or are freed too early",
  "push notifications":
    "D may not see that its blocks were written, or P may not see the registration",
  "push registration": "P and D of different versions may not match their requests",
  "pull answer": "D gets other keys of kv_transfer_params from P",
  "push answer": "D gets other keys of kv_transfer_params from P",
  "parameters read": "a proxy or a P may have to send it",
  "parameters written": "the engine itself changes kv_transfer_params",
  check:
    "this version may refuse a pair or stop a request that others serve: compare it with the table of refusals (@kv/plan/vllm)",
  "engine request": "the engine gets something else with a request: look for who may set it",
  "extra arguments read":
    "a client may set it in vllm_xargs: look for what the engine does with it",
  "extra arguments written":
    "something else of a request reaches the engine's connector: clients must not set it",
};

function consequence({ section, change, before, after }: WireDifference): string {
  if (change === "missing") return "the code was moved or rewritten: compare the sources by hand";
  if (section.startsWith("request /"))
    return change === "removed"
      ? "this version ignores it in requests"
      : "kv-proxy sends it to P and to D as it comes; named kv_…, ec_… or …_transfer_params it is refused from clients";
  if (section !== "agent metadata")
    return CONSEQUENCES[section] ?? "a part of the wire that no described version has";
  if (change === "added" && after?.includes(" = "))
    return "it has a default: other versions ignore it, and need not send it";
  if (change === "added")
    return "it is required: this version refuses the metadata of other versions";
  if (change === "removed" && before?.includes(" = ")) return "other versions use the default";
  if (change === "removed") return "other versions require it, and refuse this version's metadata";
  return "other versions refuse this version's metadata, or read it wrongly, and the reverse";
}

function shortened(text: string): string {
  const line = text.replace(/\s+/g, " ");
  return line.length > MAX_LENGTH ? `${line.slice(0, MAX_LENGTH)}…` : line;
}
