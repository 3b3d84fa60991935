import { existsSync } from "node:fs";
import puppeteer, { type Browser } from "puppeteer-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { decodeOk, prefillOk } from "../support/fake-upstream.js";
import { post, runProxy, upstream } from "../support/set-up.js";
import { startSideChannel } from "../support/side-channel.js";

const chromium = process.env.KV_CHROMIUM ?? "/usr/bin/chromium";

describe.skipIf(!existsSync(chromium))(`the page in headless Chromium (${chromium})`, () => {
  let browser: Browser;
  beforeAll(async () => {
    browser = await puppeteer.launch({
      executablePath: chromium,
      args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
      timeout: 60_000,
    });
  });
  afterAll(() => browser?.close());

  async function open(address: string) {
    const page = await browser.newPage();
    page.setDefaultTimeout(60_000);
    const complaints: string[] = [];
    page.on("pageerror", (error) => complaints.push(String(error)));
    page.on("requestfailed", (request) => complaints.push(`${request.url()} failed`));
    await page.goto(address);
    return { page, complaints };
  }

  test("shows instances, their state, and requests as they end, with timelines", async () => {
    const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
    const { url, adminUrl, proxy } = await runProxy({
      prefillers: [p.url],
      decoders: [d.url],
      admin: { port: 0 },
    });
    const { page, complaints } = await open(adminUrl);
    try {
      await page.waitForSelector("#connection[data-state=live]");
      await page.waitForSelector(`#instances tr[data-url="${d.url}"] .state[data-state=up]`);
      await post(`${url}/v1/completions`, { prompt: "a" }, { headers: { "x-request-id": "first" } });
      await page.waitForSelector("#requests tr[data-request=first] .bar .prefill");
      await post(`${url}/v1/completions`, { prompt: "a", n: 0 }, { headers: { "x-request-id": "refused" } });
      await page.waitForSelector("#requests tr[data-request=refused] .failed");
      const rows = await page.$$eval("#requests tbody tr", (all) =>
        all.map((row) => [row.dataset.request, row.querySelectorAll(".bar span").length]),
      );
      expect(rows).toEqual([
        ["refused", 0],
        ["first", 3],
      ]);
      void proxy.instances.decode.drain(d);
      await page.waitForSelector(`#instances tr[data-url="${d.url}"] .state[data-state=draining]`);
      expect(complaints).toEqual([]);
    } finally {
      await page.close();
    }
  });

  test("shows the pairs of each instance, and the factor that keeps one from a pair; readable at 390 px", async () => {
    const sides = await Promise.all(
      ["0.33.0", "0.32.0"].map((vllmVersion) =>
        startSideChannel(() => ({ engineId: vllmVersion, vllmVersion })),
      ),
    );
    const kv = sides.map(({ port }) => ({ host: "127.0.0.1", port }));
    const { adminUrl } = await runProxy({
      prefillers: [
        { url: "http://127.0.0.1:1", kv: kv[0] },
        { url: "http://127.0.0.1:2", kv: kv[1] },
      ],
      decoders: [{ url: "http://127.0.0.1:3", kv: kv[0] }],
      pairing: { mode: "strict" },
      admin: { port: 0 },
    });
    const { page, complaints } = await open(adminUrl);
    try {
      await page.setViewport({ width: 390, height: 800 });
      await page.waitForSelector("#instances td.misfit");
      const texts = await page.$$eval("#instances td.pairing, #instances td.misfit", (cells) =>
        cells.map((cell) => cell.textContent),
      );
      expect(texts).toEqual([
        "1",
        "0",
        "no pair: vllm_version is 0.32.0 at prefill and 0.33.0 at decode",
        "1",
      ]);
      expect(await page.evaluate("document.documentElement.scrollWidth")).toBeLessThanOrEqual(390);
      if (process.env.KV_SCREENSHOT !== undefined) await page.screenshot({ path: process.env.KV_SCREENSHOT });
      expect(complaints).toEqual([]);
    } finally {
      await page.close();
      for (const side of sides) await side.close();
    }
  });

  test("with a token set, asks for it and shows nothing before", async () => {
    const token = "sixteen letters!";
    const { adminUrl } = await runProxy({
      prefillers: ["p:1"],
      decoders: ["d:1"],
      admin: { port: 0, token },
    });
    const { page } = await open(adminUrl);
    try {
      await page.waitForSelector("#login:not([hidden])");
      expect(await page.$$("#instances tbody tr")).toHaveLength(0);
      await page.type("#token", token);
      await page.click("#login button");
      await page.waitForSelector("#connection[data-state=live]");
      await page.waitForSelector('#instances tr[data-url="http://p:1"]');
    } finally {
      await page.close();
    }
  });
});
