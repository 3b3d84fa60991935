// A long suite: waits for NIXL, which tries a wrong certificate for 25 s.
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { makeCertificate } from "../support/certificates.js";
import { objectRoundTrip } from "../support/object-round-trip.js";
import { type ObjectStore, startObjectStore } from "../support/object-store.js";
import { objMissing } from "../support/plugins.js";

const missing = nixlMissing ?? objMissing;

// The store is in the same process: Node's OpenSSL serves what NIXL's SDK requests with the
// system's.
describe.skipIf(missing)(`objects of a store over HTTPS (${missing ?? "OBJ found"})`, () => {
  let folder = "";
  let store: ObjectStore;
  const file = (name: string) => join(folder, name);

  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), "kv-nixl-https-"));
    for (const name of ["store", "other"]) makeCertificate(folder, name);
    store = await startObjectStore({
      key: readFileSync(file("store.key"), "utf8"),
      cert: readFileSync(file("store.pem"), "utf8"),
    });
  });
  afterAll(async () => {
    await store?.close();
    rmSync(folder, { recursive: true, force: true });
  });

  test("WRITE and READ with a store whose certificate is trusted", {
    timeout: 120_000,
  }, async () => {
    expect(await objectRoundTrip(store.port, file("store.pem"))).toBe(true);
    expect(store.objects.has("/kv/block")).toBe(true);
  });

  // The SDK repeats the request for 25 s.
  test("a store with another certificate is refused", { timeout: 120_000 }, async () => {
    store.objects.clear();
    const refused = objectRoundTrip(store.port, file("other.pem"));
    await expect(refused).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
    expect(store.objects.size).toBe(0);
  });
});
