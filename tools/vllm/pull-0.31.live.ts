import { matrix } from "./matrix.js";

matrix({ version: "0.31", mode: "pull" });
