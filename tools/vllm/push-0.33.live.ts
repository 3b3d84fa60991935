import { matrix } from "./matrix.js";

matrix({ version: "0.33", mode: "push" });
