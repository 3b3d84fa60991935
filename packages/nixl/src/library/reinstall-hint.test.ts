import { expect, test } from "vitest";
import { howToReinstall } from "./reinstall-hint.js";

const environment = { XDG_CACHE_HOME: "/nowhere/cache" };
const ours = (folder: string) =>
  howToReinstall(`/nowhere/cache/kv-nixl/${folder}/.libs/libnixl_capi.so`, environment);

test("of the cache: the command with the version and CUDA that are there", () => {
  const command = "install NIXL again: npx --no-install kv-nixl install --force";
  expect(ours("nixl-cu12-1.5.0-x86_64")).toBe(command);
  expect(ours("nixl-cu13-1.5.1-aarch64")).toBe(`${command} --version 1.5.1 --cuda 13`);
});

test("of another place: where it came from, and how to get away from there", () => {
  const hint = howToReinstall("/opt/nixl-cu12-1.5.0-x86_64/lib/libnixl_capi.so", environment);
  expect(hint).toMatch(/where it came from.*unset KV_NIXL_LIBRARY and NIXL_PREFIX/);
  expect(howToReinstall("/usr/lib/libnixl_capi.so", environment)).toBe(hint);
});
