"""Bundled data and simulated data."""

from __future__ import annotations

from covey.datasets.donors import DonorTables, simulate_donors
from covey.datasets.radon import load_radon
from covey.datasets.simulate import Simulation, simulate

__all__ = ["DonorTables", "Simulation", "load_radon", "simulate", "simulate_donors"]
