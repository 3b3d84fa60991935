// A long suite: waits for NIXL, which tries a wrong certificate for 25 s.
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { nixlTransport, objectMemory } from "@kv/nixl";
import { type ObjectStore, objectBackend, startObjectStore } from "@kv/testing/nixl/object-store";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { listsOf } from "../support/pair.js";
import { pluginMissing } from "../support/plugins.js";
import { refused } from "../support/refused.js";
import { storesAndLoads } from "./storage-cases.js";

const BLOCK = 65_536;
const missing = await pluginMissing("OBJ");

// The store is in the same process: Node's OpenSSL serves what NIXL's SDK requests with the
// system's.
describe.skipIf(missing)(`objects of a store over HTTPS (${missing ?? "OBJ found"})`, () => {
  const folder = scratchFolder();
  let store: ObjectStore;
  const file = (name: string) => join(folder, name);

  /** Makes `name.pem`, a certificate for 127.0.0.1 that signs itself, and `name.key`. */
  function makeCertificate(name: string): void {
    const options =
      "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -addext subjectAltName=IP:127.0.0.1";
    const files = ["-keyout", file(`${name}.key`), "-out", file(`${name}.pem`)];
    const args = ["req", ...options.split(" "), "-subj", `/CN=${name}`, ...files];
    execFileSync("openssl", args, { stdio: "pipe" });
  }

  beforeAll(async () => {
    for (const name of ["store", "other"]) makeCertificate(name);
    store = await startObjectStore({
      key: readFileSync(file("store.key"), "utf8"),
      cert: readFileSync(file("store.pem"), "utf8"),
    });
  });
  afterAll(() => store?.close());

  /** Writes and reads an object with a transport that trusts only this certificate. */
  async function roundTrip(certificate: string): Promise<void> {
    const trust = { scheme: "https", ca_bundle: file(certificate) };
    await using transport = nixlTransport({ backends: [objectBackend(store.port, trust)] });
    await using agent = await transport.createAgent();
    const memory = transport.allocate(BLOCK);
    const object = objectMemory("block", { lengthBytes: BLOCK });
    for (const each of [memory, object]) await agent.register(each);
    const lists = await listsOf(agent, memory, agent.name, object, BLOCK, 1);
    await storesAndLoads(agent, memory, lists, () => store.objects.get("/kv/block"));
  }

  test("WRITE and READ with a store whose certificate is trusted", { timeout: 120_000 }, () =>
    roundTrip("store.pem"),
  );

  // The SDK repeats the request for 25 s.
  test("a store with another certificate is refused", { timeout: 120_000 }, async () => {
    store.objects.clear();
    await refused(roundTrip("other.pem"), "KV_TRANSFER_FAILED");
    expect(store.objects.size).toBe(0);
  });
});
