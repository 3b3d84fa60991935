import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describePlugins, findLibrary, nixlTransport, objectMemory } from "@kv/nixl";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { nixlMissing } from "../support/nixl-available.js";
import { type ObjectStore, startObjectStore } from "../support/object-store.js";
import { fillPattern } from "../support/pattern.js";

const BLOCK = 65_536;
const [plugin] =
  nixlMissing === undefined
    ? await describePlugins({ libraryPath: await findLibrary(), names: ["OBJ"] })
    : [];
const missing = nixlMissing ?? (plugin?.loads === true ? undefined : "NIXL's OBJ plugin does not load");

// The store is in the same process: Node's OpenSSL serves what NIXL's SDK requests with the system's.
describe.skipIf(missing)(`objects of a store over HTTPS (${missing ?? "OBJ found"})`, () => {
  let folder = "";
  let store: ObjectStore;
  const file = (name: string) => join(folder, name);

  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), "kv-nixl-https-"));
    for (const name of ["store", "other"]) {
      const subject = ["-subj", `/CN=${name}`, "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"];
      const key = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes".split(" ");
      const out = ["-keyout", file(`${name}.key`), "-out", file(`${name}.pem`)];
      execFileSync("openssl", ["req", ...key, ...subject, ...out], { stdio: "pipe" });
    }
    store = await startObjectStore({
      key: readFileSync(file("store.key"), "utf8"),
      cert: readFileSync(file("store.pem"), "utf8"),
    });
  });
  afterAll(async () => {
    await store?.close();
    rmSync(folder, { recursive: true, force: true });
  });

  /** Writes one object with a transport that trusts only `certificate`, and reads it again. */
  async function roundTrip(certificate: string): Promise<boolean> {
    const parameters = {
      endpoint_override: `https://127.0.0.1:${store.port}`,
      scheme: "https",
      ca_bundle: file(certificate),
      bucket: "kv",
      region: "us-east-1",
      access_key: "any",
      secret_key: "any",
      req_checksum: "required",
    };
    await using transport = nixlTransport({ backends: [{ name: "OBJ", parameters }] });
    const agent = await transport.createAgent();
    using memory = transport.allocate(BLOCK);
    await agent.register(memory);
    const object = objectMemory("block", { lengthBytes: BLOCK });
    await agent.register(object);
    const rows = Float64Array.of(memory.address, BLOCK, 0, BLOCK, 1);
    const local = await agent.prepareLocal({ memoryType: "DRAM", rows });
    const remote = await agent.prepareRemote(agent.name, {
      memoryType: "OBJ",
      rows: Float64Array.of(0, BLOCK, object.deviceId, 0, 1),
    });
    fillPattern(memory.bytes, 5);
    const written = Buffer.from(memory.bytes);
    const ids = Int32Array.of(0);
    const lists = { local, localIds: ids, remote, remoteIds: ids } as const;
    try {
      await agent.transfer({ operation: "WRITE", ...lists }).done;
      memory.bytes.fill(0);
      await agent.transfer({ operation: "READ", ...lists }).done;
      return written.equals(memory.bytes);
    } finally {
      await agent.close();
    }
  }

  test("WRITE and READ with a store whose certificate is trusted", { timeout: 120_000 }, async () => {
    expect(await roundTrip("store.pem")).toBe(true);
    expect(store.objects.has("/kv/block")).toBe(true);
  });

  // The SDK repeats the request for 25 s.
  test("a store with another certificate is refused", { timeout: 120_000 }, async () => {
    store.objects.clear();
    await expect(roundTrip("other.pem")).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
    expect(store.objects.size).toBe(0);
  });
});
