"""Packaging of tfdp_adaptive."""

import pathlib

import setuptools

README = pathlib.Path(__file__).with_name('README.md')

setuptools.setup(
    name='tfdp-adaptive',
    version='0.1.0',
    description='Differentially private adaptive optimizers for TensorFlow, Keras and TFF',
    long_description=README.read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    license_files=['LICENSE'],
    python_requires='>=3.9',
    packages=(
        setuptools.find_packages(include=['tfdp_adaptive', 'tfdp_adaptive.*'])
        + ['tfdp_adaptive.federated']
    ),
    package_dir={'tfdp_adaptive.federated': 'federated'},
    install_requires=[
        'tensorflow>=2.14',
        'keras',
        'dp-accounting>=0.4.3',
        'numpy',
        'scipy',
        'threadpoolctl',
        'tqdm',
    ],
    extras_require={
        # Plain pip cannot resolve this one: see "Installing" in README.md.
        'federated': ['tensorflow-federated==0.87.0', 'tensorflow-privacy==0.9.0'],
        'plots': ['matplotlib>=3.7'],
        'dev': ['pytest', 'pytest-xdist', 'hypothesis', 'nbclient', 'nbformat', 'ipykernel'],
    },
    entry_points={'console_scripts': ['tfdp = tfdp_adaptive.cli.main:main']},
)
